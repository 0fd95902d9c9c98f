// A run of a model, worked out from flags and files, and what it takes to run it: shared by the
// subcommands that decode or score.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "config/run_config.h"
#include "engine/engine.h"
#include "golden.h"
#include "placement_options.h"
#include "result_output.h"
#include "text_output.h"

namespace kdtree {

// Equal on every rank but for the requests and the text, which rank 0 alone needs.
struct Job {
  ModelSource source;
  EngineOptions engine;
  LoadOptions load;
  std::vector<Request> requests;
  std::optional<GoldenCases> golden;
  std::optional<TextModel> text;           // rank 0, where prompts or outputs are text
  std::optional<JsonFile> load_file;       // rank 0: gets the experts' loads, if wanted
  std::optional<JsonFile> exchange_file;   // rank 0: gets the exchanges' counters, if wanted
  std::optional<JsonFile> placement_file;  // rank 0: gets the placement, if wanted
  std::string mode;
  std::string weights;
};

// Sizes that rank 0's input needs, for all ranks' workspaces.
struct InputNeed {
  std::int64_t longest_prompt = 1;
  std::int64_t longest_sequence = 2;  // prompt and output
  std::int64_t num_sequences = 0;
};

// Reads what is to be run into the job, on rank 0 alone.
using ReadInput = std::function<InputNeed(Job&)>;
// Sets job.text: the model's tokenizer or --tokenizer. InputError as TextModel.
void load_text_model(const RunConfig& config, Job& job);
// The requests of `config`: the job's goldens if it has any, else the prompts.
InputNeed read_requests(const RunConfig& config, Job& job);

// The job of equal options on all ranks, sized for rank 0's input. `more_options` are options
// besides `config` that ranks must share. Collective. AgreedError for whatever is wrong with flags,
// files and prompts.
Job agree_on_job(const RunConfig& config, const std::string& more_options, const ReadInput& read,
                 ProcessGroup& group);

// Positions beyond max_position_embeddings are outside what the model was made for; a config
// without the key sets no limit.
std::int64_t context_limit(const ModelConfig& model);

// Where a job runs, with its weights loaded.
struct LoadedJob {
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Communicator> communicator;
  std::optional<RankGroups> groups;  // of the communicator's ranks, as job.engine.grid says
  std::optional<LoadedModel> model;
};
// Collective. Sets job.load, and job.engine.max_context where --memory-fraction asks for it. `job`
// and `group` outlive the result. AgreedError where backend, communicator or weights do not come.
LoadedJob load_job(const RunConfig& config, Job& job, ProcessGroup& group);

// Where and with what the job runs, with the sizes of job.engine. Collective.
RunFacts job_facts(const Job& job, const LoadedJob& loaded, ProcessGroup& group);
// Logs them.
void log_facts(const RunFacts& facts);

}  // namespace kdtree
