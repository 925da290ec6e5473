// --pipeline-timeline: the pipeline's timeline as estimated before a run and as measured in it, on the
// terminal and in files. timeline/pipeline_timeline.h draws, and timeline/pipeline_watch.h measures.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/parallel/pipeline/pipeline_simulation.h"
#include "llmc/plan/run_plan.h"
#include "llmc/timeline/pipeline_watch.h"
#include "llmc/train/console.h"

namespace llmc {

struct PreparedRun;

// A timeline and its title, one line.
struct TitledTimeline {
    Timeline timeline;
    std::string title;
};
// The estimate of plan/pipeline_estimate.h, at the device's peak if that is known.
TitledTimeline estimated_pipeline(const RunPlan& plan, std::optional<double> peak);
TitledTimeline measured_pipeline(const RunPlan& plan, const MeasuredPipeline& measured);
// The simulation with the median times of passes. The title gives the simulated time as a share of the
// measured one for three inputs: median pass times, mean pass times of each step, and the measured time of
// every pass. The third share is below 1 only by the time between passes.
TitledTimeline simulated_pipeline(const RunPlan& plan, const MeasuredPipeline& measured);

// A table of the median times of each chunk's passes.
std::string pass_times_text(const RunPlan& plan, const MeasuredPipeline& measured);

// The names of a run's files. The first is written before the run, the others after measuring.
constexpr std::string_view estimated_name = "pipeline-estimated", measured_name = "pipeline-measured",
                           simulated_name = "pipeline-simulated";
std::vector<std::string> pipeline_files();
// Writes the picture NAME.svg and the trace NAME.json (for ui.perfetto.dev). Throws UserError if that fails.
void write_timeline(const std::filesystem::path& folder, std::string_view name, const TitledTimeline& drawn);

// Show the estimate before a run, and the measured and simulated timelines after it. They go to the console,
// and to the folder if one is given.
void show_expected(Console& console, const RunPlan& plan, std::optional<double> peak,
                   const std::optional<std::filesystem::path>& folder);
void show_measured(Console& console, const RunPlan& plan, const MeasuredPipeline& measured,
                   const std::optional<std::filesystem::path>& folder);

// Measures and shows the pipeline of a run for --pipeline-timeline. Without that option it does nothing.
class PipelineRecorder {
  public:
    // Shows the expected timeline, and begins to measure if the run trains. The run outlives it.
    PipelineRecorder(PreparedRun& run, std::optional<std::filesystem::path> folder);
    // Called after each step. Records the times of its actions.
    void see(std::int64_t step);
    // Shows what was measured. All ranks call it.
    void show();

  private:
    PreparedRun& run_;
    std::optional<std::filesystem::path> folder_;
    std::optional<PipelineWatch> watch_;
};

}  // namespace llmc
