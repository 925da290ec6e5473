// A run that is only planned: what it needs of one machine after another, computed in one process without a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/parallel/mesh.h"
#include "llmc/plan/activation_peak.h"
#include "llmc/plan/run_plan.h"
#include "llmc/planner/conventions.h"
#include "llmc/planner/described_models.h"
#include "llmc/planner/machines.h"
#include "llmc/planner/plan_options.h"
#include "llmc/planner/published_times.h"
#include "llmc/train/options.h"

namespace llmc {

// What a rank's process takes on a GPU beside its arenas, about: no plan knows the driver's and the libraries' own
// memory exactly.
struct BesideArenas {
    std::size_t context, libraries, nccl;
    std::size_t total() const { return context + libraries + nccl; }
};

// The time of a step, in seconds: no run is faster than the bound.
struct PlannedTime {
    std::optional<double> bound{};  // none if the speed was given
    double expected = 0, tokens_per_second = 0;
    std::optional<TimeParts> parts{};       // of `expected`; none if the speed was given
    std::optional<PublishedRange> range{};  // none if nobody has published steps of this generation
};

// The price of training on all tokens (--tokens), with what is lost.
struct Cost {
    double gpu_hours = 0, days = 0, factor = 1;
    std::optional<double> dollars{};
};

// A run that a search or a list of levers found.
struct Found {
    std::string options{};  // beyond those that were given
    int gpus = 0;
    std::int64_t batch_tokens = 0;
    std::size_t bytes = 0;  // of the stage that needs most
    double tokens_per_second = 0;
    std::optional<double> dollars{};  // for 1e9 tokens
    double rank = 0;                  // the larger, the better: tokens/s, or those per dollar
};
struct Search {
    std::int64_t considered = 0,
                 simulated = 0;  // runs that a bound was found for, and whose step was simulated
    double most_speed = 0;       // tokens/s that no run of a number of GPUs exceeds
    std::vector<Found> best;     // at most ten
    // Where the number of GPUs is open: the fewest that fit, the best of all, and the fewest that end in --days.
    std::optional<Found> fewest{}, cheapest{}, in_time{};
};

// What one option alone, or two, would save and cost.
struct Lever {
    std::string options;
    std::size_t bytes_saved = 0;  // of the stage that needs most
    double seconds_lost = 0;      // of a step; 0 if times are not known
    bool fits = false;
};
struct Levers {
    std::int64_t micro_batch = 0;  // sequences, the most that fit
    std::int64_t context = 0;      // tokens, the most that fit with micro-batches of one sequence
    std::vector<Lever> single, pairs;
    std::string
        first_fit;  // the options that cost least time among those with which the run fits; empty: none
};

enum class Verdict {
    fits,
    tight /* within the last GiB */,
    does_not_fit,
    impossible /* no run can have it */
};
std::string_view name_of(Verdict verdict);

// What a run may exceed, in bytes.
inline constexpr std::string_view memory_rule = "memory of a rank", host_rule = "host memory of a rank",
                                  disk_rule = "disk of a rank";

struct PlannedRun {
    PlanOptions asked;
    Options options;    // of the run
    int processes = 1;  // in all
    PlannedMachines machines;
    // What is planned: a model that this program trains, or one that it only describes (none: --parameters).
    std::optional<Model> model;
    std::optional<DescribedModel> described{};
    std::optional<Mesh> mesh;
    std::optional<RunSpec> spec;
    std::size_t staging_bytes = 0;
    std::optional<RunNeeds> needs;  // none if no run can have these options
    std::optional<ActivationPeak> peak;
    std::optional<PlannedTime> estimate;  // by the model of time, on GPUs
    std::optional<RunPlan> fullest;       // the short plan of the stage that needs most
    std::vector<Rule> why_not;
    Verdict verdict = Verdict::impossible;
    std::vector<std::string> notes;
    std::vector<std::string> arguments;  // of the run and of its plan
    std::optional<Search> search;
    std::optional<Levers> levers;
    std::string command;  // which starts the run; empty if none can

    double parameters() const;
    std::int64_t sequence_length() const;
    std::optional<double> flops_per_token() const;
    Convention convention_used() const;                    // by --memory-convention
    std::optional<ConventionalMemory> convention() const;  // none for `accelerate`
    // By --convention-activations by-layer: four times a micro-batch's residual stream (one sequence, unless its size
    // was given), in the dtype of the convention's weights; else none.
    std::optional<double> activation_bytes_of_layer() const;
    double accelerate_bytes() const;          // of the model in fp32, as Accelerate counts it
    std::optional<PlannedTime> time() const;  // none on CPUs, unless the speed is given
    std::optional<Cost> cost() const;

    const StageNeeds& fullest_stage() const {
        return needs->stages[static_cast<std::size_t>(needs->fullest_stage())];
    }
    std::optional<BesideArenas> beside() const;
};

// Reads the command line of a run without the word "plan": its options and machines, without a mesh. For --help returns
// false and puts the output into `text`. UserError for options without a meaning.
bool read(PlannedRun& run, std::vector<std::string> arguments, std::string& text);
// The same as far as its mesh and `spec`. UserError also for options that no run can have.
bool prepare(PlannedRun& run, const std::vector<std::string>& arguments, std::string& text);

// The arguments and the words of a text.
std::vector<std::string> with_options(std::vector<std::string> arguments, const std::string& options);

// What can be compared between runs.
struct Estimate {
    std::size_t bytes = 0, usable = 0;          // of the stage that needs most
    bool fits_beside = true;                    // whether the host and the disk hold what is offloaded
    double seconds = 0, tokens_per_second = 0;  // expected; 0: not known
    bool fits() const { return bytes <= usable && fits_beside; }
};
// Nothing if no run can have the options, or if it has to fit and does not.
std::optional<Estimate> estimate_of(const std::vector<std::string>& arguments, bool must_fit);

// Plans the run of a command line without the word "plan". For --help returns nothing and puts the output into `text`.
// UserError for options without a meaning; options that only break a rule get a plan that says so (changes.h: and what
// would mend it).
std::optional<PlannedRun> planned_run(const std::vector<std::string>& arguments, std::string& text);

}  // namespace llmc
