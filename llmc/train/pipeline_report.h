// What --pipeline-timeline shows: the pipeline's timeline as it is expected before a run and as it was measured in one,
// on the terminal and as files. The drawing itself is train/pipeline_timeline.h, measuring pipeline_watch.h.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/parallel/pipeline_simulation.h"
#include "llmc/plan/run_plan.h"
#include "llmc/train/console.h"
#include "llmc/train/pipeline_watch.h"

namespace llmc {

// A timeline and the line above it.
struct TitledTimeline {
    Timeline timeline;
    std::string title;
};
// As plan/pipeline_estimate.h has it, at the device's peak if that is known.
TitledTimeline estimated_pipeline(const RunPlan& plan, std::optional<double> peak);
TitledTimeline measured_pipeline(const RunPlan& plan, const MeasuredPipeline& measured);
// The simulation of passes that take what they usually took. Its title says how much of the measured step that explains;
// how much of each step its own means do; and how much the times of this step's own passes do, which lacks only what stages lose between passes.
TitledTimeline simulated_pipeline(const RunPlan& plan, const MeasuredPipeline& measured);

// What the passes of each chunk usually took: a table.
std::string pass_times_text(const RunPlan& plan, const MeasuredPipeline& measured);

// The files of a run: the first is there before it, the others when something has been measured.
constexpr std::string_view estimated_name = "pipeline-estimated", measured_name = "pipeline-measured",
                           simulated_name = "pipeline-simulated";
std::vector<std::string> pipeline_files();
// NAME.svg and NAME.json, a trace. UserError where they cannot be written.
void write_timeline(const std::filesystem::path& folder, std::string_view name, const TitledTimeline& drawn);

// What is expected before a run, and what was measured and simulated after it: on the console, and in the folder, if there
// is one.
void show_expected(Console& console, const RunPlan& plan, std::optional<double> peak,
                   const std::optional<std::filesystem::path>& folder);
void show_measured(Console& console, const RunPlan& plan, const MeasuredPipeline& measured,
                   const std::optional<std::filesystem::path>& folder);

}  // namespace llmc
