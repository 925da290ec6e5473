// The options of the program: every option with its default and its help text, and the checks of their
// values.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "llmc/core/dtype.h"
#include "llmc/device/device.h"
#include "llmc/io/adapter_files.h"
#include "llmc/model/family.h"
#include "llmc/model/part_lists.h"
#include "llmc/optim/formulas.h"
#include "llmc/optim/schedule.h"
#include "llmc/parallel/mesh.h"
#include "llmc/parallel/pipeline/pipeline_schedule.h"
#include "llmc/parallel/zero/store_layout.h"

namespace CLI {
class App;
}

namespace llmc {

// The options of the model families (model/family.h). One that was not given is empty.
using ModelOption = std::variant<std::optional<std::int64_t>, std::optional<double>,
                                 std::optional<std::string>, std::optional<bool>>;
using ModelOptions = std::map<std::string, ModelOption, std::less<>>;
ModelOptions unset_model_options();
// Those of the optimizers (optim/formulas.h), in the same way.
using OptimizerOption = std::variant<std::optional<double>, std::optional<bool>, std::optional<std::string>>;
using OptimizerOptions = std::map<std::string, OptimizerOption, std::less<>>;
OptimizerOptions unset_optimizer_options();

struct Options {
    // model; sizes that are not given come from the named model
    std::string model = "tiny";
    ModelOptions model_options = unset_model_options();
    std::string init;
    // The folder in Hugging Face's format whose model this is (folder_options.h), and its config.json. A
    // checkpoint keeps both.
    struct Folder {
        std::string path, config;
    };
    std::optional<Folder> folder;
    std::string model_folder;  // the folder in --model

    // adapters (model/low_rank.h); none without a rank
    std::optional<std::int64_t> lora_rank;
    double lora_alpha = 32;
    bool lora_rslora = false;
    std::string lora_layers = "all";
    std::string base_dtype;     // "nf4", or the compute dtype
    std::string lora;           // the folder of an adapter
    std::string base_checksum;  // that the folder of --lora names; empty: none
    std::string dtype_of_base;  // that it names

    // data
    std::string train_data;
    std::string val_data;
    // The folder of the tokenizer in the checkpoint that a run goes on from; empty: none.
    std::string tokenizer_of_checkpoint;
    std::string tokenizer;  // a folder; by default the model's own, or data/gpt2_bpe for GPT-2's vocabulary

    // training
    std::int64_t steps = 1200;
    std::optional<std::int64_t> global_batch_tokens;  // default: depends on the sequence length
    std::optional<std::int64_t> micro_batch_size;     // default: the plan chooses it
    std::uint64_t seed = 1;
    std::string precision;  // a level (precision.h), or empty
    std::string dtype;      // default: depends on the device
    std::string gradient_dtype = "fp32";
    std::string moments_dtype = "fp32";
    std::string master_dtype = "fp32";
    std::string fp8 = "none";
    std::string offload_optimizer = "none", offload_parameters = "none";
    std::string nvme_dir;  // of what is offloaded to nvme; several, separated by commas
    std::int64_t fp8_history = 16;
    std::optional<std::int64_t> loss_scale;          // fixed; default: dynamic
    std::optional<std::int64_t> initial_loss_scale;  // default: depends on the batch
    std::int64_t loss_scale_window = 2000;
    std::int64_t loss_scale_hysteresis = 1;
    std::string device = "auto";
    std::string attention = "flash";
    bool tf32 = false;
    bool cuda_sync = false;
    bool share_gpu = false;
    std::int64_t communication_timeout = 600;
    std::string recompute = "none";
    std::optional<std::int64_t> recompute_every;  // only with a --recompute other than none

    // sharding
    std::int64_t zero_stage = 0;
    std::optional<std::int64_t> zero_shard_size;  // default: all processes
    bool shards_on_machine = false;               // HYBRID_SHARD: the groups are those of a machine
    std::string reduce_every;                     // default: depends on the ZeRO stage
    std::optional<std::int64_t> prefetch_units;   // only at stage 3, or with parameters on a disk
    bool reshard_after_forward = true;
    bool overlap_grad_reduce = true;
    std::int64_t check_replicas_every = 0;

    // tensor parallelism
    std::int64_t tensor_parallel = 1;
    bool sequence_parallel = false;

    // pipeline
    std::int64_t pipeline_parallel = 1;
    std::string pipeline_schedule;               // default: depends on the number of chunks
    std::optional<std::int64_t> virtual_stages;  // default: depends on the schedule
    std::string pipeline_layers;

    // optimizer
    std::string optimizer = "adamw";
    std::optional<double> learning_rate;  // default: depends on the model and the optimizer
    std::string schedule = "cosine";
    std::optional<std::int64_t> warmup_steps;  // default: depends on the schedule
    double min_lr_fraction = 0.1;
    std::optional<double> weight_decay;  // default: depends on the optimizer
    OptimizerOptions optimizer_options = unset_optimizer_options();
    double grad_clip = 1.0;
    bool stochastic_rounding = false;

    // results
    std::string out_dir;
    std::string metrics;
    std::int64_t checkpoint_every = 0;
    bool checkpoint_async = true;
    std::int64_t keep_last = 0;
    bool keep_best = false;
    std::string export_file;
    std::string export_dtype;  // default: the folder's, or fp32
    std::string merge;         // "trained": adapters are merged into their base; empty: exported alone
    std::int64_t log_every = 10;

    // validation and samples
    std::int64_t val_every = 100;
    std::int64_t val_batches = 20;
    std::string eval_hellaswag;
    std::int64_t eval_every = 0;
    std::int64_t eval_examples = 0;
    std::int64_t sample_every = 0;
    std::int64_t sample_tokens = 400;
    std::string prompt;
    double temperature = 0.8;
    std::int64_t top_k = 0;
    double top_p = 1;

    // modes of the program (--generate, --print-step), and how the values above came about
    std::set<std::string, std::less<>> given;       // on the command line
    std::string config_file;                        // as given to --config
    std::map<std::string, int, std::less<>> lines;  // the settings in config_file, each with its line number
    std::vector<std::string> notes;                 // to print: settings that are ignored or change nothing
    // From the checkpoint of --resume or --init (resume.h); true if the configuration of its run gave it.
    std::map<std::string, bool, std::less<>> inherited;
    std::set<std::string, std::less<>> of_precision;  // the settings that the level of --precision set
    // Whether a setting was given, directly, by a level or by a checkpoint. All others have defaults.
    bool is_given(std::string_view name) const {
        return given.contains(name) || lines.contains(name) || inherited.contains(name) ||
               of_precision.contains(name);
    }
    // Whether somebody gave a setting, to this run or to the one that it continues.
    bool was_chosen(std::string_view name) const {
        const auto earlier = inherited.find(name);
        return given.contains(name) || lines.contains(name) || of_precision.contains(name) ||
               (earlier != inherited.end() && earlier->second);
    }
    std::string weights;                // the file or the checkpoint that --init means
    std::optional<std::string> resume;  // a checkpoint's directory; empty means the newest in out_dir
    bool takes_newest = false;          // nobody named that checkpoint: it is the newest of a run
    // Checkpoints that are then passed over (Damages, io/checkpoint.h).
    std::map<std::string, std::string> damages;
    bool resume_if_any = false;     // like an empty `resume`, but without a run to resume it begins one
    bool new_data = false;          // resume although the data have changed
    bool overwrite = false;         // begin a new run in the place of the one in out_dir
    std::string verify_checkpoint;  // the directory of a checkpoint or a run, which is only verified
    bool generate = false;          // also with --chat
    bool chat = false;
    std::string system;  // the text that begins the conversation of --chat
    bool print_step = false;
    bool print_model = false;
    bool pipeline_timeline = false;
    bool verbose = false;
    bool quiet = false;

    // Whether the program only prints a plan: the model, the actions of a step, or the pipeline's estimated
    // timeline. One process can then plan for all pipeline stages and tensor-parallel ranks, with one
    // data-parallel rank.
    bool plans_only() const;
    // Whether the run needs the model's memory. With --steps 0 it may only plan.
    bool uses_weights() const;

    // The options must be resolved. make_model() throws UserError if they make no valid model.
    ModelChoices choices_of_model() const;
    Model make_model() const;
    bool has_adapters() const { return lora_rank.has_value(); }
    AdapterConfig adapters() const;
    std::int64_t size_of_model(std::string_view name) const {
        return std::get<std::optional<std::int64_t>>(model_options.find(name)->second).value();
    }
    std::int64_t sequence_length() const { return size_of_model("seq-len"); }
    std::int64_t vocabulary() const { return size_of_model("vocab-size"); }
    std::int64_t layers() const { return size_of_model("layers"); }
    DType compute_dtype() const;
    DType kept_gradient_dtype() const;
    DType kept_moments_dtype() const;
    const Optimizer& optimizer_used() const { return optimizer_named(optimizer); }
    // The values of hyperparameters. The options must be resolved.
    double value_of(const Hyperparameter& number) const;
    HyperparameterValues numbers_of(const Optimizer& of) const;
    StoreDtypes store_dtypes() const;
    Fp8Scaling fp8_scaling() const;
    // Whether weights are rounded to bf16 at random.
    bool rounds_stochastically() const { return stochastic_rounding || master_dtype == "none"; }
    ScheduleKind schedule_kind() const;
    // The mesh as seen by one process. Throws UserError if the processes cannot be divided as the options
    // ask.
    Mesh mesh(int processes, int rank) const;
    PipelineSchedule kind_of_pipeline_schedule() const;
    int chunks_of_stage() const;
    Recompute recomputation() const;
    Offload offload() const;  // --device must be known
    // Whether checkpoints are to be saved while training goes on; and whether that is possible.
    bool saves_beside_training() const;
    bool copies_checkpoints() const { return saves_beside_training() && offload().state != Tier::disk; }
};

// The learning-rate schedule. The options must be resolved.
Schedule schedule_of(const Options& options);

// An option that the program no longer has. The first version without it refuses it by name, on the command
// line and in configuration files. Later versions drop its entry here.
struct RemovedOption {
    std::string_view name;       // without the dashes
    std::string_view version;    // the first one without it: "0.2"
    std::string_view successor;  // the text to type instead: "--new-name", "--dtype bf16"
};
std::span<const RemovedOption> removed_options();

// Reads the command line and --config. For --help and --version it returns nothing and puts the output into
// `text`. Throws UserError for wrong options. configured() completes the result, and the plan of the run chooses
// micro_batch_size. `damages`: for Options::damages.
std::optional<Options> parse_options(int argc, const char* const* argv, std::string& text,
                                     std::span<const RemovedOption> removed = removed_options(),
                                     const std::map<std::string, std::string>& damages = {});

// Another command than a run, which has all options of a run, and its own in the place of --processes.
struct OtherCommand {
    std::string_view name, description, exit_statuses;  // for --help
    std::function<void(CLI::App&)> add_options;
};
std::optional<Options> parse_options(int argc, const char* const* argv, std::string& text,
                                     const OtherCommand& command);

// The options of a run on a device of this kind: --device, and --dtype by default. UserError for options that such a
// device does not support.
Options for_device(Options options, DeviceKind device);

// A process of a job.
struct JobPlace {
    int processes = 1, on_machine = 1;  // of the job; of this process's machine
    int rank = 0;
};

// The constant configuration of a run.
struct Configuration {
    Options options;
    Mesh mesh;  // as this process sees it
};
// Completes what parse_options() returned, on the device and the processes of a job: the groups of HYBRID_SHARD; a
// default batch that the data-parallel ranks share evenly, with a note; --reduce-every. A pure function, which runs
// and plans use. UserError if the processes cannot be divided as the options ask.
Configuration configured(const Options& options, DeviceKind device, const JobPlace& place);

// Puts the file and line before an error about a setting of the configuration file. Such an error begins with
// the setting's name: "--lr -3 is out of range" becomes "x.toml, line 3: --lr -3 is out of range".
std::string with_place(const Options& options, std::string_view error);

// Every setting with its current value. The keys are the names of the options without dashes.
nlohmann::ordered_json to_json(const Options& options);
// The settings that were given, as a configuration file for --config. Comments show the values of all others.
std::string to_toml(const Options& options);

}  // namespace llmc
