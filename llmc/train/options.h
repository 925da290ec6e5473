// What a person can ask of the program: every option with its default, its place in the help, and what is
// refused.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/core/dtype.h"
#include "llmc/device/device.h"
#include "llmc/model/family.h"
#include "llmc/model/recompute.h"
#include "llmc/optim/schedule.h"
#include "llmc/parallel/mesh.h"
#include "llmc/parallel/pipeline_schedule.h"

namespace llmc {

// The families' options (model/family.h): sizes, which may not be given, and switches.
struct ModelOptions {
    std::map<std::string, std::optional<std::int64_t>, std::less<>> sizes;
    std::map<std::string, bool, std::less<>> switches;
};
ModelOptions unset_model_options();

struct Options {
    // model; the sizes that are not given come from the named model
    std::string model = "tiny";
    ModelOptions of_model = unset_model_options();
    std::string init;

    // data
    std::string train_data;
    std::string val_data;
    std::string bpe_directory;  // by default data/gpt2_bpe, where it is and the vocabulary is GPT-2's

    // training
    std::int64_t steps = 1200;
    std::optional<std::int64_t> global_batch_tokens;  // by default follows from the sequence length
    std::optional<std::int64_t> micro_batch_size;     // by default follows from the mesh, in the run's plan
    std::uint64_t seed = 1;
    std::string dtype;  // by default follows from the device
    std::string gradient_dtype = "fp32";
    std::string device = "auto";
    std::string attention = "flash";
    bool tf32 = false;
    bool cuda_sync = false;
    bool share_gpu = false;
    std::int64_t communication_timeout = 600;
    std::string recompute = "none";
    std::optional<std::int64_t> recompute_every;  // of what recomputes something

    // sharding
    std::int64_t zero_stage = 0;
    std::optional<std::int64_t> zero_shard_size;  // by default all processes
    std::string reduce_every;                     // by default follows from the stage in force
    std::optional<std::int64_t> prefetch_units;   // of stage 3
    bool reshard_after_forward = true;
    bool overlap_grad_reduce = true;
    std::int64_t check_replicas_every = 0;

    // tensor parallelism
    std::int64_t tensor_parallel = 1;
    bool sequence_parallel = false;

    // pipeline
    std::int64_t pipeline_parallel = 1;
    std::string pipeline_schedule;               // by default follows from the number of chunks
    std::optional<std::int64_t> virtual_stages;  // by default follows from the schedule
    std::string pipeline_layers;

    // optimizer
    std::optional<double> learning_rate;  // by default follows from the model
    std::string schedule = "cosine";
    std::optional<std::int64_t> warmup_steps;  // by default follows from the schedule
    double min_lr_fraction = 0.1;
    double weight_decay = 0.1;
    double beta1 = 0.9;
    double beta2 = 0.95;
    double eps = 1e-8;
    double grad_clip = 1.0;
    bool stochastic_rounding = false;

    // results
    std::string out_dir;
    std::string metrics;
    std::int64_t checkpoint_every = 0;
    std::string export_file;

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

    // actions, and what a saved configuration does not hold
    std::set<std::string, std::less<>> given;       // on the command line
    std::string config_file;                        // that was read
    std::map<std::string, int, std::less<>> lines;  // of it, of the settings that it gives
    std::vector<std::string> notes;                 // to be said: what is passed over, or changes nothing
    // Settings that were not given and follow from others: with other ones they follow from those.
    std::set<std::string, std::less<>> derived;
    std::optional<std::string> resume;  // a checkpoint's directory; empty: the newest in out_dir
    bool generate = false;
    bool print_step = false;
    bool print_model = false;
    bool pipeline_timeline = false;
    bool verbose = false;

    // Whether nothing is asked for but what can be said of a run without one: its actions, or the timeline of its pipeline.
    // One process then stands for all that the run takes.
    bool plans_only() const;
    int processes_of_plan(int started) const;

    // Of resolved options. UserError if they make no model.
    Model make_model() const;
    std::int64_t sequence_length() const { return of_model.sizes.find("seq-len")->second.value(); }
    std::int64_t vocabulary() const { return of_model.sizes.find("vocab-size")->second.value(); }
    std::int64_t layers() const { return of_model.sizes.find("layers")->second.value(); }
    DType compute_dtype() const;
    DType kept_gradient_dtype() const;
    ScheduleKind schedule_kind() const;
    // Of a process among so many. UserError if they cannot be divided as was asked for.
    Mesh mesh(int processes, int rank) const;
    PipelineSchedule kind_of_pipeline_schedule() const;
    int chunks_of_stage() const;
    Recompute recomputation() const;
};

// Reads the command line and --config. Returns nothing where --help or --version was asked for: `text` then
// holds what to print. Throws UserError for what is wrong. In the result only micro_batch_size may still be
// empty, --device and --dtype wait for settle_device, and --reduce-every for settle_mesh.
std::optional<Options> parse_options(int argc, const char* const* argv, std::string& text);

// What follows from the device that was found: --device itself, the dtype where none was given. UserError for what
// does not go with it.
void settle_device(Options& options, DeviceKind device);

// What follows from the mesh: when gradients are reduced, where that was not given.
void settle_mesh(Options& options, const Mesh& mesh);

// The line of an error about a setting, which begins with its name ("--lr -3 is out of range"), and where it stands, if
// that is in the configuration file: "x.toml, line 3: --lr -3 is out of range".
std::string with_place(const Options& options, std::string_view error);

// Every setting with the value in force, by its name on the command line without the dashes.
nlohmann::ordered_json to_json(const Options& options);
// The same as a configuration file for --config, but for what was not given and follows from other settings.
std::string to_toml(const Options& options);

}  // namespace llmc
