// A run that is only planned: what it needs of one machine after another, computed in one process without a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/device/gpu_table.h"
#include "llmc/device/sizes.h"
#include "llmc/parallel/mesh.h"
#include "llmc/plan/activation_peak.h"
#include "llmc/plan/run_plan.h"
#include "llmc/planner/conventions.h"
#include "llmc/planner/described_models.h"
#include "llmc/planner/plan_options.h"
#include "llmc/train/options.h"

namespace llmc {

// The machines of a planned run.
struct PlannedMachines {
    std::optional<GpuModel> gpu;  // with the values that options override; none: CPUs
    int nodes = 1, ranks_of_node = 1;
    double host_bytes = 0;  // of a node; 0: not known
    // The memory of a rank for its arenas: on a GPU 1 GiB less than a process sees, for CUDA's context and NCCL. 0: not
    // known.
    std::size_t usable = 0;
    std::unique_ptr<DeviceSizes> sizes;
};

// What a rank's process takes on a GPU beside its arenas, about: no plan knows the driver's and the libraries' own
// memory exactly.
struct BesideArenas {
    std::size_t context, libraries, nccl;
    std::size_t total() const { return context + libraries + nccl; }
};

// The part of the rates of benchmarks that software reached in published steps, by the geometric mean, and how far the
// times that follow are from those steps, in the mean (scripts/plan_error.py).
inline constexpr double software_share = 0.75, time_error = 0.14;

// The time of a step, in seconds: no run is faster than the bound.
struct PlannedTime {
    std::optional<double> bound{};  // none if the speed was given
    double expected = 0, tokens_per_second = 0;
};

// The price of training on all tokens (--tokens), with what is lost.
struct Cost {
    double gpu_hours = 0, days = 0, factor = 1;
    std::optional<double> dollars{};
};

enum class Verdict {
    fits,
    tight /* within the last GiB */,
    does_not_fit,
    impossible /* no run can have it */
};
std::string_view name_of(Verdict verdict);

inline constexpr std::string_view memory_rule = "memory of a rank";

struct PlannedRun {
    PlanOptions asked;
    Options options;  // of the run
    PlannedMachines machines;
    // What is planned: a model that this program trains, or one that it only describes (none: --parameters).
    std::optional<Model> model;
    const DescribedModel* described = nullptr;
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
    std::string command;                 // which starts the run; empty if none can

    double parameters() const;
    std::optional<double> flops_per_token() const;
    std::optional<ConventionalMemory> convention() const;  // none for `accelerate`
    double accelerate_bytes() const;                       // of the model in fp32, as Accelerate counts it
    std::optional<PlannedTime> time() const;               // none on CPUs, unless the speed is given
    std::optional<Cost> cost() const;

    const StageNeeds& fullest_stage() const {
        return needs->stages[static_cast<std::size_t>(needs->fullest_stage())];
    }
    std::optional<BesideArenas> beside() const;
};

// Reads the command line of a run without the word "plan", as far as its mesh and `spec`. For --help returns false and
// puts the output into `text`. UserError for options that no run can have.
bool prepare(PlannedRun& run, std::vector<std::string> arguments, std::string& text);

// Plans the run of a command line without the word "plan". For --help returns nothing and puts the output into `text`.
// UserError for options without a meaning; options that only break a rule get a plan that says so.
std::optional<PlannedRun> planned_run(const std::vector<std::string>& arguments, std::string& text);

}  // namespace llmc
