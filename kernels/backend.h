// Every operation that the engine computes, once. kernels/cpu and kernels/cuda implement it.
//
// Conventions of all ops:
// - Shapes are row-major, outermost first; "rows" counts the tokens of a call (nodes of all trees,
//   or prompt tokens). rows == 0 is legal and does nothing. Inputs and outputs do not overlap
//   unless an op says so.
// - "activation" tensors have the dtype that activation_dtype() names (float32 on the CPU). Index
//   tensors are int32.
// - Row independence: the bits of an output row do not depend on how many other rows the call has,
//   nor on their content. Sums run in an order that is fixed by the shapes alone.
// - Work is ordered on stream(); the memory of all tensors belongs to the caller.
// - Malformed shapes are programming errors and throw Error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "core/buffer.h"
#include "core/tensor_view.h"
#include "kernels/memory_traits.h"
#include "kernels/random_fill.h"
#include "kernels/weight_view.h"

namespace kdtree {

// How the two halves of a rotated pair lie in memory.
enum class RopeLayout : std::uint8_t {
  kInterleaved,  // pairs (x0, x1), (x2, x3), ...: the target's convention
  kHalfSplit,    // pairs (x[i], x[i + dim / 2]): the drafter's convention ("neox")
};

struct RopeParams {
  TensorView x;                // [rows, width] activation, rotated in place; may be strided
  std::int64_t num_heads = 1;  // heads lie at h * head_stride + offset, rope_dim values each
  std::int64_t head_stride = 0;
  std::int64_t offset = 0;
  ConstTensorView positions;  // [rows]
  // [max_positions, rope_dim] float32: rope_dim / 2 cosines, then the sines
  ConstTensorView cos_sin;
  RopeLayout layout = RopeLayout::kInterleaved;
};

// Head sizes of multi-head latent attention, with the heads of this rank.
struct MlaShape {
  std::int64_t num_heads = 0;  // heads of this rank
  std::int64_t qk_nope_head_dim = 0;
  std::int64_t qk_rope_head_dim = 0;
  std::int64_t v_head_dim = 0;
  std::int64_t kv_lora_rank = 0;

  std::int64_t qk_head_dim() const { return qk_nope_head_dim + qk_rope_head_dim; }
  // Width of a latent cache row: the compressed key/value, then the rotated key.
  std::int64_t latent_dim() const { return kv_lora_rank + qk_rope_head_dim; }
};

// The rows of one step: for each sequence a tree of nodes (or a chain of prompt tokens).
struct TreeBatch {
  std::int64_t num_sequences = 0;
  std::int64_t num_rows = 0;
  ConstTensorView token_ids;       // [rows]
  ConstTensorView positions;       // [rows] = prefix length + depth
  ConstTensorView sequence_index;  // [rows] index into the arrays of length num_sequences
  ConstTensorView slots;           // [sequences] the sequence's place in the caches
  ConstTensorView prefix_lengths;  // [sequences] committed cache rows, visible to every node
  ConstTensorView row_offsets;     // [sequences + 1] first row of each sequence
  // [rows, words] int64 bit masks: bit j of word j / 64 says that node j of the same tree is
  // visible (its ancestors and itself; only bits up to the node's own index are set). Without data:
  // a chain, node j sees 0..j.
  ConstTensorView ancestor_mask;
  // [sequences] the first rows of each sequence that are no padding. Without data: all of them.
  ConstTensorView num_real_rows = {};
};

struct TreeAttentionParams {
  MlaShape shape;
  float softmax_scale = 1;
  ConstTensorView query;  // [rows, num_heads * latent_dim] activation: absorbed query, then rotated
                          // query, per head
  ConstTensorView cache;  // [slots, capacity, latent_dim] activation
  TreeBatch batch;
  TensorView output;  // [rows, num_heads * kv_lora_rank] activation
};

enum class RouterScoring : std::uint8_t { kSigmoid, kSoftmax };
enum class RouterMethod : std::uint8_t {
  kNoAuxTc,  // sigmoid scores + correction bias choose; groups by the sum of their two best
  kGreedy,   // best scores of all
  kGroupLimitedGreedy,  // groups by their best score
};

struct RouterParams {
  ConstTensorView logits;           // [rows, n_routed_experts] float32
  ConstTensorView correction_bias;  // [n_routed_experts] float32, or no data
  RouterScoring scoring = RouterScoring::kSigmoid;
  RouterMethod method = RouterMethod::kNoAuxTc;
  std::int64_t n_group = 1;
  std::int64_t topk_group = 1;
  bool norm_topk_prob = true;  // divide the chosen scores by their sum + 1e-20
  bool scale_always = true;    // false (DeepSeek-V2): scale only if norm_topk_prob is false
  float routed_scaling_factor = 1;
  // [rows, num_experts_per_tok] logical experts, best first, ties to the lower id
  TensorView expert_ids;
  TensorView expert_weights;  // [rows, num_experts_per_tok] float32
};

// The routed experts of one layer that a rank holds; slot s holds gate[s], up[s], down[s].
struct ExpertWeights {
  std::span<const WeightView> gate;  // [moe_intermediate, hidden]
  std::span<const WeightView> up;    // [moe_intermediate, hidden]
  std::span<const WeightView> down;  // [hidden, moe_intermediate]
};

// Experts as their backend addresses them, made once by make_expert_set. The matrices outlive it.
class ExpertSet {
 public:
  ExpertSet() = default;
  ExpertSet(const ExpertSet&) = delete;
  ExpertSet& operator=(const ExpertSet&) = delete;
  virtual ~ExpertSet() = default;
};

struct ExpertsParams {
  const ExpertSet* experts = nullptr;  // of the same backend
  ConstTensorView x;                   // [rows, hidden] activation; may be strided
  // [rows, k] logical experts, or what ChooseReplicasParams has as targets; -1 = none; may be
  // strided
  ConstTensorView expert_ids;
  ConstTensorView expert_weights;   // [rows, k] float32; may be strided
  ConstTensorView logical_to_slot;  // [experts or targets] slot on this rank of each, or -1
  // [rows, hidden] activation: sum over k, in order of k, of the experts held here
  TensorView output;
  TensorView workspace;  // [bytes] uint8, at least experts_workspace_bytes()
};

// Which of an expert's replicas computes it for a row. The choice follows from the experts of the
// row alone (replica_choice.h), so that it does not depend on the other rows of a call.
struct ChooseReplicasParams {
  ConstTensorView expert_ids;       // [rows, k] logical experts; -1 = none; may be strided
  ConstTensorView replica_offsets;  // [n_routed_experts + 1], ascending, none without a replica
  // [slots] expert e is in physical_slots[replica_offsets[e]] up to the next expert's
  ConstTensorView physical_slots;
  TensorView targets;  // [rows, k] the physical slot for each; -1 = none; may be strided
};

// Adds to the counts of the experts that rows chose, but for rows that are padding.
struct CountExpertsParams {
  ConstTensorView expert_ids;  // [rows, k] logical experts; -1 = none; may be strided
  TreeBatch batch;             // its rows, sequences and num_real_rows
  TensorView counts;           // [n_routed_experts] int64, added to
};

// Which rows go to which rank: a row goes once to each rank that holds one of its experts.
struct DispatchPlanParams {
  ConstTensorView expert_ids;  // [rows, k] of the rows to send, as ExpertsParams has them
  ConstTensorView rank_of;     // [experts or targets] the rank that holds each
  // Places of each rank, at least `rows`: rank r's rows begin at place r * places_a_rank. 0: ranks
  // follow one another without gaps.
  std::int64_t places_a_rank = 0;
  // [places] the row of each place, ascending within a rank; -1 where there is none. At least
  // ranks * places_a_rank places or, without gaps, rows * min(k, ranks).
  TensorView row_indices;
  TensorView counts;  // [ranks] int64 rows for each rank
};

// A dispatched row: x, then expert ids, then expert weights, each from a 16-byte boundary on.
struct DispatchMessage {
  std::int64_t ids_offset = 0;
  std::int64_t weights_offset = 0;
  std::int64_t bytes = 0;
};
DispatchMessage dispatch_message(std::int64_t hidden_size, std::int64_t num_experts_per_tok,
                                 DType activation_dtype);

struct PackDispatchParams {
  ConstTensorView x;               // [rows, hidden] activation; may be strided
  ConstTensorView expert_ids;      // [rows, k]; may be strided
  ConstTensorView expert_weights;  // [rows, k] float32; may be strided
  ConstTensorView row_indices;     // [places] as DispatchPlanParams has them
  // [places, dispatch_message().bytes] uint8, 16-byte aligned. A place without a row gets zeros and
  // no experts (-1).
  TensorView messages;
};

struct CacheWriteParams {
  ConstTensorView values;  // [rows, width] activation; may be strided
  TensorView cache;        // [slots, capacity, width] activation
  // row r goes to cache row prefix_length + (r - row_offset) of its sequence's slot
  TreeBatch batch;
};

struct BlockAttentionParams {
  std::int64_t num_heads = 0;            // query heads of this rank
  std::int64_t num_key_value_heads = 0;  // key/value heads of this rank
  std::int64_t head_dim = 0;
  // Query head h of this rank reads local key/value head kv_head_of[h].
  ConstTensorView kv_head_of;  // [num_heads]
  float softmax_scale = 1;
  ConstTensorView query;        // [rows, num_heads * head_dim] activation
  ConstTensorView key_cache;    // [slots, capacity, num_key_value_heads * head_dim] activation
  ConstTensorView value_cache;  // the same shape
  // a row sees its whole slot: prefix and every row of its own sequence in the batch
  TreeBatch batch;
  TensorView output;  // [rows, num_heads * head_dim] activation
};

// The draft trees of a batch; node 0 of each is the root. Fixed strides, so that one tensor serves
// any number of nodes.
struct TreeArrays {
  TensorView num_nodes;  // [sequences] nodes with the root
  TensorView token_ids;  // [sequences, max_nodes]
  TensorView parents;    // [sequences, max_nodes], the root's is -1, parent index < node index
  TensorView depths;     // [sequences, max_nodes], the root's is 0
};

struct TreeBuildParams {
  ConstTensorView log_probs;   // [sequences * draft_horizon, K] float32, descending
  ConstTensorView candidates;  // [sequences * draft_horizon, K] token ids of these; -1 = none
  std::int64_t draft_horizon = 0;
  ConstTensorView roots;         // [sequences] the root tokens
  std::int64_t tree_budget = 0;  // nodes without the root, at most
  TreeArrays trees;              // max_nodes >= tree_budget + 1
};

struct AcceptParams {
  TreeArrays trees;
  ConstTensorView choices;      // [rows] the target's token at every node, sequence after sequence
  ConstTensorView row_offsets;  // [sequences + 1] first row of each sequence in `choices`
  TensorView path_lengths;      // [sequences] nodes on the accepted path, with the root
  // [sequences, max_path] their indices, ascending; max_path >= longest depth + 1
  TensorView paths;
  TensorView bonus_tokens;  // [sequences] the target's token behind the path
};

struct CompactParams {
  TensorView cache;                // [slots, capacity, width] activation
  ConstTensorView slots;           // [sequences]
  ConstTensorView prefix_lengths;  // [sequences]
  ConstTensorView path_lengths;    // [sequences]
  // [sequences, max_path]: cache row prefix + paths[i] moves to prefix + i. Ascending, paths[i] >=
  // i.
  ConstTensorView paths;
};

// Rows of a verify step from the trees of its sequences: row s * max_nodes + node. Rows behind a
// tree's last node are padding: token 0 at the root's position, seeing the prefix and themselves
// only.
struct ExpandTreesParams {
  TreeArrays trees;                // [sequences, max_nodes]
  ConstTensorView prefix_lengths;  // [sequences]
  TensorView token_ids;            // [sequences * max_nodes]
  TensorView positions;            // [sequences * max_nodes] = prefix + depth
  TensorView ancestor_mask;        // [sequences * max_nodes, words] as TreeBatch has it
};

// Rows of the drafter's blocks: [root, mask token, ...] at positions prefix, prefix + 1, ...
struct ExpandBlocksParams {
  ConstTensorView roots;           // [sequences]
  ConstTensorView prefix_lengths;  // [sequences]
  std::int32_t mask_token_id = 0;
  TensorView token_ids;  // [sequences, block_size]
  TensorView positions;  // [sequences, block_size]
};

// Where the accepted nodes of a step lie among its rows, for gathering them. Places behind a path's
// end repeat its last node.
struct AcceptedRowsParams {
  ConstTensorView paths;           // [sequences, max_path]
  ConstTensorView path_lengths;    // [sequences]
  ConstTensorView prefix_lengths;  // [sequences]
  std::int64_t max_nodes = 0;      // rows of a sequence in the step
  TensorView rows;                 // [sequences, max_path] s * max_nodes + node
  TensorView positions;            // [sequences, max_path] prefix + place
};

// What a backend computes on. For results and for sizes of measurements, not for choosing kernels.
struct DeviceFacts {
  std::string name;  // "NVIDIA H200"; the model name of a CPU, "unknown" where none is given
  std::string architecture;  // "sm_90", "x86_64"
  std::string uuid;          // "GPU-..."; empty for a CPU
  std::string driver_cuda;   // newest CUDA that the driver knows, "13.0"; empty for a CPU
  int num_processors = 0;    // multiprocessors of the GPU; cores of the host
  std::int64_t memory_bytes = 0;
  std::int64_t cache_bytes = 0;  // L2 of the GPU, last level of the CPU; 0: the system does not say
};

class Backend : public MemoryTraits {
 public:
  static constexpr std::size_t kNumMarks = 2048;
  static constexpr std::size_t kNumFences = 4;

  // ---- memory and order -------------------------------------------------------------------------
  virtual std::string name() const = 0;  // "cpu", "cuda"
  virtual Stream stream() const = 0;
  virtual int num_threads() const = 0;  // host threads that ops may use
  virtual DeviceFacts device_facts() const = 0;
  // Zero-filled memory of this device, aligned to 256 bytes. Never called inside a step.
  virtual Buffer allocate(std::int64_t bytes) = 0;
  // Copies of `bytes` between host and this device, finished in stream order; the host sees a
  // download's result after synchronize().
  virtual void upload(void* device, const void* host, std::int64_t bytes) = 0;
  virtual void download(void* host, const void* device, std::int64_t bytes) = 0;
  virtual void synchronize() = 0;
  // Zero-filled host memory that copies reach without a stage between: a download into it waits for
  // nothing and may be recorded. Never called inside a step.
  virtual Buffer allocate_host(std::int64_t bytes) = 0;
  // Marks a place in stream order, outside run_recorded; index < kNumFences. wait_fence returns
  // when all work before the last set_fence of that index is done.
  virtual void set_fence(std::size_t index) = 0;
  virtual void wait_fence(std::size_t index) = 0;
  // Memory that allocate() could still get: of the whole host for the CPU backend, of this rank's
  // GPU for CUDA.
  virtual std::int64_t free_bytes() const = 0;
  // Called once for each matrix when its elements have been uploaded: the backend may put them into
  // another order, in place. Ops get prepared matrices only.
  virtual void prepare(const WeightView& matrix) = 0;
  virtual std::unique_ptr<ExpertSet> make_expert_set(const ExpertWeights& weights) = 0;
  // Runs `body`, which calls ops and collectives on stream() with fixed arguments. Where the
  // backend can, it records the work once under `key` and replays it later without calling `body`;
  // `key` stands for everything that body's arguments depend on. `replayable` false (a collective
  // that needs the host) always runs body.
  virtual void run_recorded(std::int64_t key, bool replayable,
                            const std::function<void()>& body) = 0;
  // Drops what was recorded under `key`, if anything was.
  virtual void forget_recorded(std::int64_t key) = 0;
  // Time stamps in stream order, also inside run_recorded; index < kNumMarks. milliseconds_between
  // is for when the work up to both is done (synchronize, wait_fence) and neither is stamped anew.
  virtual void mark(std::size_t index) = 0;
  virtual double milliseconds_between(std::size_t first, std::size_t second) = 0;
  // Device to device. Equal shapes and dtypes; either side may be strided.
  virtual void copy(ConstTensorView source, TensorView target) = 0;
  // Contiguous, any dtype.
  virtual void fill_zero(TensorView target) = 0;
  // target [rows, cols]: element (r, c) is what `fill` says of element
  // (block.first_row + r) * block.total_columns + block.first_column + c. Contiguous; int32 for
  // kBits, float32 or bf16 for kBFloat16.
  virtual void fill_random(const RandomFill& fill, const RandomBlock& block, TensorView target) = 0;

  // ---- dense layers -----------------------------------------------------------------------------
  // out[r] = table row token_ids[r] - first_row, or zeros where another rank holds that row. table
  // not INT4.
  virtual void embed(const WeightView& table, std::int64_t first_row, ConstTensorView token_ids,
                     TensorView out) = 0;
  // y[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight, in float32. weight [cols] float32. x, y [rows,
  // cols] may be strided and may be the same tensor.
  virtual void rms_norm(ConstTensorView x, ConstTensorView weight, float eps, TensorView y) = 0;
  // y[r, o] = sum_i w[o, i] * x[r, i]; x [rows, in], y [rows, out], both may be strided; y may be
  // float32 or activation. in == 0 gives zeros.
  virtual void linear(const WeightView& w, ConstTensorView x, TensorView y) = 0;
  // x += delta, [rows, cols].
  virtual void add(TensorView x, ConstTensorView delta) = 0;
  // x += delta, then y = rms_norm(x); the same bits as add and rms_norm. Contiguous [rows, cols].
  virtual void add_rms_norm(TensorView x, ConstTensorView delta, ConstTensorView weight, float eps,
                            TensorView y) = 0;
  // y = silu(gate) * up, [rows, cols] each; y may be gate.
  virtual void swiglu(ConstTensorView gate, ConstTensorView up, TensorView y) = 0;
  // out[r] = source[indices[r]]; source [n, cols], out [rows, cols] of the same dtype (any), each
  // may be strided.
  virtual void gather_rows(ConstTensorView source, ConstTensorView indices, TensorView out) = 0;
  // target[indices[i]] += source[i], one i after the other (several i may name the same row; a
  // negative one names none). source [n, cols].
  virtual void add_rows(ConstTensorView source, ConstTensorView indices, TensorView target) = 0;

  // ---- attention --------------------------------------------------------------------------------
  virtual void rope(const RopeParams& params) = 0;
  // Absorbed MLA: query[r, h] = [q_nope . W_UK[h] | q_rope]. kv_b [heads * (nope + v),
  // kv_lora_rank] float32 or bf16, W_UK[h] the first nope rows of head h. q [rows, heads *
  // qk_head_dim], query [rows, heads * latent_dim].
  virtual void absorb_query(const WeightView& kv_b, const MlaShape& shape, ConstTensorView q,
                            TensorView query) = 0;
  // out[r, h] = W_UV[h] . o_latent[r, h], W_UV[h] the last v rows of head h. o_latent [rows, heads
  // * kv_lora_rank], out [rows, heads * v_head_dim].
  virtual void expand_value(const WeightView& kv_b, const MlaShape& shape, ConstTensorView o_latent,
                            TensorView out) = 0;
  virtual void cache_write(const CacheWriteParams& params) = 0;
  // softmax(query . cache * scale) . cache[:kv_lora_rank] over the prefix and the visible nodes, in
  // order of position. With bf16 activations softmax weights may be rounded to bf16.
  virtual void tree_attention(const TreeAttentionParams& params) = 0;
  // Bidirectional grouped-query attention of the drafter's block over its context and itself.
  virtual void block_attention(const BlockAttentionParams& params) = 0;

  // ---- mixture of experts -----------------------------------------------------------------------
  virtual void router(const RouterParams& params) = 0;
  virtual void choose_replicas(const ChooseReplicasParams& params) = 0;
  virtual void count_experts(const CountExpertsParams& params) = 0;
  virtual void experts(const ExpertsParams& params) = 0;
  virtual void plan_dispatch(const DispatchPlanParams& params) = 0;
  virtual void pack_dispatch(const PackDispatchParams& params) = 0;

  // ---- vocabulary -------------------------------------------------------------------------------
  // The k best of each row of logits [rows, vocabulary part], descending, ties to the lower id; ids
  // are first_id + column. NaN counts as -infinity. Missing ones (k larger than the part) are
  // -infinity with id -1. values [rows, k] float32, ids [rows, k].
  virtual void top_k(ConstTensorView logits, std::int64_t first_id, TensorView values,
                     TensorView ids) = 0;
  // partials[r] = (m, s): m the row's largest logit, s = sum exp(logit - m); (-infinity, 0) for an
  // empty part. logits [rows, part] float32, partials [rows, 2] float32.
  virtual void log_sum_exp_partials(ConstTensorView logits, TensorView partials) = 0;
  // Merges the candidates of all parts: part_values, part_ids [parts, rows, k_in], values, ids
  // [rows, k_out] with the same order and ties. With partials [parts, rows, 2] values become
  // log-probabilities (float32 log-softmax over the whole vocabulary); without data they stay
  // logits.
  virtual void merge_top_k(ConstTensorView part_values, ConstTensorView part_ids,
                           ConstTensorView partials, TensorView values, TensorView ids) = 0;

  // ---- speculation ------------------------------------------------------------------------------
  // Best-first tree: the tree_budget most probable prefixes (facts: heap over (log-weight, rank
  // tuple)). A child's log-weight is its parent's (float64) plus its own log-probability; ties go
  // to the lexicographically smaller tuple of candidate ranks. NaN and -infinity candidates are
  // never taken.
  virtual void build_trees(const TreeBuildParams& params) = 0;
  // Greedy accept: from the root, follow the child whose token is the target's choice. Bounded on
  // malformed trees.
  virtual void accept(const AcceptParams& params) = 0;
  // Moves the accepted rows of a cache together. All rows are read before any is written.
  virtual void compact(const CompactParams& params) = 0;
  virtual void expand_trees(const ExpandTreesParams& params) = 0;
  virtual void expand_blocks(const ExpandBlocksParams& params) = 0;
  virtual void accepted_rows(const AcceptedRowsParams& params) = 0;
  // The next step's start: prefix_lengths[s] += path_lengths[s], roots[s] = bonus_tokens[s]; all
  // [sequences].
  virtual void advance(ConstTensorView path_lengths, ConstTensorView bonus_tokens,
                       TensorView prefix_lengths, TensorView roots) = 0;

  // ---- measurement ------------------------------------------------------------------------------
  // sum[0] = the sum of all words modulo 2^32: reads a buffer once and does next to nothing else,
  // which is what other ops are compared with. words [n] int32, contiguous; sum [1] int32.
  virtual void sum_words(ConstTensorView words, TensorView sum) = 0;
};

struct BackendOptions {
  std::string name =
      "auto";           // auto | cpu | cuda; auto takes cuda where it is built and a GPU is there
  int num_threads = 1;  // host threads of the CPU backend
  int local_rank = 0;   // of this process on its host: chooses the GPU
  // kFloat32 or kBFloat16; the CPU backend computes in float32 whatever is asked for.
  DType activation_dtype = DType::kFloat32;
};

// InputError for an unknown name or one that this build or machine does not have.
std::unique_ptr<Backend> make_backend(const BackendOptions& options);

// What the backend `name` ("cpu", "cuda") needs, whether or not this build and machine have it.
// `activation_dtype` as BackendOptions has it. InputError for an unknown name.
std::unique_ptr<MemoryTraits> make_memory_traits(const std::string& name, DType activation_dtype);

}  // namespace kdtree
