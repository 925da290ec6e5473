// The meshes, micro-batches and recomputations that a search compares, each with a lower bound of its memory and time.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "llmc/parallel/pipeline/pipeline_schedule.h"
#include "llmc/plan/step_time.h"
#include "llmc/planner/planned_run.h"

namespace llmc {

// Bounds take the stages of a pipeline for equal, which they are not quite.
inline constexpr double margin_of_bounds = 1.03;

// What a search leaves as it is: the options that were given; or, for a change that makes a run fit on any mesh, no
// less recomputation and sharding, and no larger micro-batches, than the run has.
enum class Fixed { given, memory };

struct Candidate {
    int tensor = 1, stages = 1, chunks = 1;  // chunks of a stage
    PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
    int zero_stage = 0, shards = 0;  // 0: all data-parallel ranks, or --zero-shard-size
    std::string_view recompute = "none";
    std::int64_t micro_batch = 1;
    std::string options{};     // beyond those of the run
    double least_seconds = 0;  // no step is faster
    double least_bytes = 0;    // of a GPU
};

// The rates at which its steps are expected.
StepRates rates_of(const PlannedRun& run);

// The times of a micro-batch over all stages, which do not depend on the number of GPUs: for searches of one model on
// one GPU model.
class ModelTimes {
  public:
    // None if the model cannot be divided so.
    std::optional<ModelTime> of(const PlannedRun& run, const Candidate& mesh, bool sequence_parallel);

  private:
    using Key = std::tuple<int, int, std::string_view, std::int64_t, DType>;
    std::map<Key, std::optional<ModelTime>> known_;
};

// The candidates of one model on one number of GPUs: of `run`, only what read() finds.
class Candidates {
  public:
    // Without uses_bounds also those whose bound says that they do not fit.
    Candidates(const PlannedRun& run, ModelTimes& passes, Fixed fixed, bool uses_bounds);

    // The fastest by its bound first.
    std::vector<Candidate> all();
    std::int64_t considered() const { return considered_; }

  private:
    std::vector<int> choices(std::string_view option, std::int64_t given, const std::vector<int>& all) const;
    std::vector<PipelineSchedule> schedules() const;
    std::vector<int> chunks_of(const Candidate& mesh) const;
    std::vector<std::int64_t> micro_batches_of(std::int64_t sequences) const;
    std::vector<std::string_view> recomputes() const;
    void add_pipelines(Candidate mesh, int data, std::int64_t sequences);
    void add_micro_batches(Candidate mesh, int data, std::int64_t sequences);
    void add_sharding(Candidate mesh, int data, std::int64_t micro_batches);
    void add(Candidate mesh, int data, std::int64_t micro_batches);
    double least_compute(const Candidate& mesh, const ModelTime& pass, double micro_batches) const;
    double least_exchange(const Candidate& mesh, int data, double micro_batches) const;
    double least_offload(const Candidate& mesh, int data, double micro_batches, double passes) const;
    double least_activations(const Candidate& mesh, const ModelTime& pass, double micro_batches) const;
    // Bytes of an average rank's share of the state, on the GPU, on the host and on the disk.
    struct Shares {
        double gpu = 0, host = 0, disk = 0;
    };
    Shares least_state(const Candidate& mesh, int data) const;
    double parameters_of_rank(const Candidate& mesh) const { return parameters_ / mesh.tensor / mesh.stages; }
    double shards_of(const Candidate& mesh, int data) const;
    bool is_sequence_parallel(const Candidate& mesh) const;
    std::string text_of(const Candidate& mesh) const;

    const PlannedRun& run_;
    ModelTimes& passes_;
    const Fixed fixed_;
    const bool uses_bounds_;
    const Options& options_;
    const double parameters_;
    double trained_, weight_bytes_;  // the share of parameters that is trained; bytes of a parameter
    const StepRates rates_;
    std::vector<Candidate> found_;
    std::int64_t considered_ = 0;
};

}  // namespace llmc
