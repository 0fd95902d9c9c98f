#!/usr/bin/env bash
# Files that are damaged, incomplete or of another kind, on one rank and (a representative of each
# kind) on three.
source "$(dirname "${BASH_SOURCE[0]}")/support/common.sh"

"$python" "$support/break_models.py" "$KDTREE_TEST_DATA" "$goldens" "$work"
cd "$work"
prompt=(--prompt-ids '1,2,3' --max-new-tokens 2 --threads 1)
target=$goldens/dflash_trained_bf16/target

# --- A bundle or directory that must not load -----------------------------------------------------

refused 0 'none.kdtr: no such file or directory' generate --model none.kdtr "${prompt[@]}"
# MODEL WORDS
while read -r model words; do
  refused 0 "$words" generate --model "$model" "${prompt[@]}"
done <<'CASES'
empty.kdtr empty.kdtr: not a KDTR bundle: begins with '', expected 'KDTR'
prefix.kdtr prefix.kdtr: truncated: 20 bytes
header.kdtr header.kdtr: truncated: the header ends at byte
data.kdtr data.kdtr: truncated: expected
longer.kdtr something follows the last tensor
magic.kdtr magic.kdtr: not a KDTR bundle: begins with 'GGUF', expected 'KDTR'
version.kdtr version.kdtr: format version 2; this program reads up to 1
huge_header.kdtr huge_header.kdtr: header of 9223372036854775808 bytes
header_checksum.kdtr header_checksum.kdtr: header checksum is
no_json.kdtr no_json.kdtr: not valid JSON
no_tensors.kdtr no_tensors.kdtr: the header holds no tensor table
split_checksum.kdtr tensor "model.layers.0.mlp.down_proj.weight": checksum is
expert_checksum.kdtr tensor "model.layers.1.mlp.experts.7.up_proj.weight": checksum is
norm_checksum.kdtr tensor "model.norm.weight": checksum is
drafter_checksum.kdtr norm.weight": checksum is
shape.kdtr shape.kdtr: tensor "model.norm.weight" has shape [2, 48], expected [96]
dtype.kdtr dtype.kdtr: tensor "lm_head.weight" is I32, expected F32
unsupported_dtype.kdtr unsupported_dtype.kdtr: tensor "lm_head.weight" is of dtype F64
missing_tensor.kdtr tensor "model.layers.2.mlp.gate.weight" is missing, expected with shape [8, 96]
unknown_tensor.kdtr tensor "model.layers.1.self_attn.surprise.weight" is unknown
only_scales.kdtr tensor "model.layers.1.mlp.experts.3.up_proj.weight.sc" is unknown
group_size_7.kdtr group_size_7.kdtr: key 'quantization.group_size' is 7, expected
group_size_24.kdtr weight.sc" has shape [48, 6], expected [48, 4]
group_size_text.kdtr group_size_text.kdtr: key 'quantization.group_size' is "16", expected
architecture.kdtr key 'architectures' is ["LlamaForCausalLM"], expected ["DeepseekV3ForCausalLM"]
missing_key.kdtr (target.config): key 'kv_lora_rank' is missing, expected
key_type.kdtr (target.config): key 'hidden_size' is "wide", expected an integer
eos_type.kdtr (target.config): key 'eos_token_id' is {"id":1}, expected
draft_hidden.kdtr draft_hidden.kdtr: the drafter's hidden_size is 64, the target's 96
draft_tap.kdtr target_layer_ids names layer 3, the target has layers 0 to 2
draft_vocabulary.kdtr the drafter's vocab_size is 640, the target's 320
draft_mask.kdtr mask_token_id' is 320, expected an id below vocab_size 320
dir_no_config dir_no_config: holds no config.json
dir_config_no_json dir_config_no_json/config.json: not valid JSON
dir_no_weights dir_no_weights: holds neither model.safetensors nor model.safetensors.index.json
dir_garbage dir_garbage/model.safetensors: the header does not begin with '{'
dir_long_header dir_long_header/model.safetensors: header of 18446744073709551615 bytes
dir_no_shard dir_no_shard/model-00002-of-000003.safetensors: no such file
dir_lacking is missing, although dir_lacking/model.safetensors.index.json places it there
dir_index_path is "../elsewhere.safetensors", expected the name of a file beside it
dir_overlap e_score_correction_bias" begins at byte 24594, inside the one before it
dir_hole e_score_correction_bias" begins at byte 24598, expected 24596 (no gaps)
dir_wrong_size e_score_correction_bias": holds 66 bytes, but shape [16] of F32 takes 64
dir_truncated dir_truncated/model.safetensors: truncated: expected 3594136 bytes
dir_twice dir_twice/model.safetensors: JSON object holds the key "__metadata__" twice
dir_int4_nan experts.0.down_proj.weight_scale": scale [3, 1] is nan, expected a finite number, 0 or
dir_int4_infinite experts.0.down_proj.weight_scale": scale [3, 1] is inf, expected a finite number
dir_int4_negative experts.0.down_proj.weight_scale": scale [3, 1] is -0.5, expected a finite number
dir_fp8_nan dir_fp8_nan/model.safetensors: tensor "model.layers.0.mlp.down_proj.weight_scale_inv": scale [1, 0] is nan
dir_fp8_infinite down_proj.weight_scale_inv": scale [1, 0] is inf, expected a finite number
dir_fp8_negative down_proj.weight_scale_inv": scale [1, 0] is -0.5, expected a finite number
dir_int4_scale_shape experts.0.down_proj.weight_scale" has shape [2, 128], expected [128, 2]
dir_fp8_scale_shape down_proj.weight_scale_inv" has shape [1, 2], expected [2, 2]
dir_weight_shape experts.0.down_proj.weight_shape" holds [64, 128], expected [128, 64]
dir_group_size is packed INT4, but groups of 48 do not divide
dir_dtype_f64 tensor "model.norm.weight" is of dtype F64
dir_dtype_unknown "BF61"
dir_shape_overflow but shape [1099511627776,1099511627776] of F32 takes more than any file
dir_shape_negative a size of shape is -1, expected an integer from 0 to 2^60
dir_offset_negative data_offsets[0] is -2, expected an integer from 0 to 2^60
dir_offset_float data_offsets[0] is 0.0, expected an integer from 0 to 2^60
dir_offset_text data_offsets[0] is "0", expected an integer from 0 to 2^60
dir_name_bytes dir_name_bytes/model.safetensors: not valid JSON
dir_empty_file 0 bytes are too few for a safetensors file
dir_index_list key 'weight_map' is [], expected an object
dir_index_number is 3, expected a file name
dir_index_absolute is "/shard.safetensors", expected the name of a file beside it
dir_directory dir_directory/model.safetensors: not a regular file
dir_pipe dir_pipe/model.safetensors: not a regular file
dir_pipe_shard model-00002-of-000003.safetensors: not a regular file
pipe.kdtr pipe.kdtr: not a regular file
dir_end_link dir_end_link/generation_config.json: No such file or directory
dir_few_tokens has shape [512, 128], expected [511, 128]
dir_no_experts key 'n_routed_experts' is 0, expected a positive integer
dir_top_k key 'num_experts_per_tok' is 17, expected an integer from 1 to 16
dir_rope_factor key 'rope_scaling.factor' is 0, expected a number from 1
dir_end_beyond key 'eos_token_id' is 512, expected an integer from 0 to 511
dir_eps_nan dir_eps_nan/config.json: not valid JSON
/dev/null /dev/null: not a regular file
CASES

# --- Drafters -------------------------------------------------------------------------------------

not_dflash='drafter, which is not supported; DFlash ones are'
refused 0 "draft_dflash2/config.json: key 'architectures' is [\"DFlash2DraftModel\"], expected [\"DFlashDraftModel\"]: this is a DFlash2 $not_dflash" \
  generate --model "$target" --draft draft_dflash2 "${prompt[@]}"
refused 0 "draft_domino/config.json: key 'architectures' is [\"DominoDraftModel\"], expected [\"DFlashDraftModel\"]: this is a Domino $not_dflash" \
  generate --model "$target" --draft draft_domino "${prompt[@]}"
refused 3 "this is a Domino $not_dflash" \
  generate --model "$target" --draft draft_domino "${prompt[@]}"
refused 0 "key 'dflash_config.projector_type' is \"domino\", expected null: this is a Domino" \
  generate --model "$target" --draft draft_projector "${prompt[@]}"
refused 0 "draft_eagle3/config.json: key 'architectures' is [\"LlamaForCausalLMEagle3\"], expected" \
  generate --model "$target" --draft draft_eagle3 "${prompt[@]}"
refused 0 "key 'dflash_config.conv_kernel_size' is 3, expected null: this is a DFlash2 $not_dflash" \
  generate --model "$target" --draft draft_kernel "${prompt[@]}"
refused 0 "the drafter's hidden_size is" generate --model "$target" --draft "$tiny" "${prompt[@]}"
refused 0 'no_drafter.kdtr: the bundle holds no drafter' \
  generate --model "$target" --draft no_drafter.kdtr "${prompt[@]}"
for mode in chain tree; do
  refused 0 "--mode $mode needs a drafter, and no_drafter.kdtr holds none: give --draft" \
    generate --model no_drafter.kdtr --mode "$mode" "${prompt[@]}"
  refused 0 "--mode $mode needs a drafter" generate --model "$target" --mode "$mode" "${prompt[@]}"
done

refused 0 'the rotary amplitude cannot be set to 1.4: the config has no YaRN' \
  generate --model "$target" --draft "$goldens/dflash_trained_bf16/draft" \
  --draft-rope-amplitude 1.4 "${prompt[@]}"
refused 0 '--draft-rope-amplitude 1.4 needs a drafter, and no_drafter.kdtr holds none' \
  generate --model no_drafter.kdtr --draft-rope-amplitude 1.4 "${prompt[@]}"
refused 0 '--draft-rope-amplitude 1.4: --mode plain has no drafter' \
  generate --model "$int4" --mode plain --draft-rope-amplitude 1.4 "${prompt[@]}"
refused 0 "'0' is no number above 0 up to 100" \
  generate --model "$int4" --draft-rope-amplitude 0 "${prompt[@]}"
refused 0 "'yarn' is no number above 0 up to 100" \
  generate --model "$int4" --draft-rope-amplitude yarn "${prompt[@]}"

# --- Weights and goldens --------------------------------------------------------------------------

refused 0 'quantised weights were asked for, but it holds none' \
  generate --model "$tiny" --weights quantized "${prompt[@]}"
refused 0 'is stored as INT4 only, but original weights were asked for' \
  generate --model "$goldens/kimi_nested_int4" --weights original "${prompt[@]}"
refused 0 'is stored as INT4 only, but original weights were asked for' \
  generate --model only_quantized.kdtr --weights original "${prompt[@]}"
refused 0 "--verify-golden: $goldens/kimi_nested_int4 holds no golden outputs" \
  generate --model "$goldens/kimi_nested_int4" --verify-golden
refused 0 '--verify-golden: only_quantized.kdtr holds no golden outputs for its original weights' \
  generate --model only_quantized.kdtr --verify-golden --weights original
refused 0 'bad_golden.kdtr: a golden case has no list of token ids under prompt_ids' \
  generate --model bad_golden.kdtr --verify-golden

# The results are printed, the verdict is in the exit code.
for ranks in 0 2; do
  launch "$result_limit_s" "$ranks" generate --model other_golden.kdtr --verify-golden \
    --output-format json --threads 1
  holds "ranks $ranks: a golden that differs gives exit code 1" test "$code" -eq 1
  holds "ranks $ranks: five lines" test "$(wc -l <"$out")" -eq 5
  holds "ranks $ranks: the difference is told" test \
    "$(count_in "$err" 'golden prompt 1: output token 7 is')" -eq 1
  holds "ranks $ranks: the verdict is told" test \
    "$(count_in "$err" 'golden outputs (original weights): 1 of 5 prompts differ')" -eq 1
done

# --- inspect --------------------------------------------------------------------------------------

refused 0 'none.kdtr: no such file or directory' inspect --model none.kdtr
refused 0 'header_checksum.kdtr: header checksum is' inspect --model header_checksum.kdtr
refused 0 'dir_no_config: holds no config.json' inspect --model dir_no_config
refused 0 'dir_garbage/model.safetensors: the header' inspect --model dir_garbage
refused 0 'not in {text,json}' inspect --model "$tiny" --output-format yaml

# --- Three ranks ----------------------------------------------------------------------------------

refused 3 'none.kdtr: no such file or directory' generate --model none.kdtr "${prompt[@]}"
refused 3 'data.kdtr: truncated: expected' generate --model data.kdtr "${prompt[@]}"
# Parts of it lie on all ranks, of which one verifies the whole; an expert lies on one rank, whose
# number the error names; norms lie on all.
refused 3 'tensor "model.layers.0.mlp.down_proj.weight": checksum is' \
  generate --model split_checksum.kdtr "${prompt[@]}"
refused 3 'rank 2: expert_checksum.kdtr: tensor "model.layers.1.mlp.experts.7.up_proj.weight"' \
  generate --model expert_checksum.kdtr "${prompt[@]}"
refused 3 'tensor "model.norm.weight": checksum is' \
  generate --model norm_checksum.kdtr "${prompt[@]}"
refused 3 'tensor "model.layers.2.mlp.gate.weight" is missing' \
  generate --model missing_tensor.kdtr "${prompt[@]}"
refused 3 "key 'kv_lora_rank' is missing" generate --model missing_key.kdtr "${prompt[@]}"
refused 3 'target_layer_ids names layer 3' generate --model draft_tap.kdtr "${prompt[@]}"
# MODEL WORDS
while read -r model words; do
  refused 3 "$words" generate --model "$model" "${prompt[@]}"
done <<'CASES'
dir_no_shard dir_no_shard/model-00002-of-000003.safetensors: no such file
dir_lacking is missing, although dir_lacking/model.safetensors.index.json places it there
dir_overlap dir_overlap/model.safetensors: tensor
dir_truncated dir_truncated/model.safetensors: truncated
dir_long_header dir_long_header/model.safetensors: header of 18446744073709551615 bytes
dir_twice dir_twice/model.safetensors: JSON object holds the key "__metadata__" twice
dir_dtype_f64 tensor "model.norm.weight" is of dtype F64
dir_group_size is packed INT4, but groups of 48 do not divide
dir_int4_scale_shape experts.0.down_proj.weight_scale" has shape [2, 128], expected [128, 2]
dir_pipe_shard model-00002-of-000003.safetensors: not a regular file
CASES
refused 3 'experts.0.down_proj.weight_scale": scale [3, 1] is nan' \
  generate --model dir_int4_nan "${prompt[@]}"
refused 3 'down_proj.weight_scale_inv": scale [1, 0] is nan' \
  generate --model dir_fp8_nan "${prompt[@]}"
refused 3 '--mode tree needs a drafter' generate --model no_drafter.kdtr --mode tree "${prompt[@]}"
refused 3 'header_checksum.kdtr: header checksum is' inspect --model header_checksum.kdtr

finish
