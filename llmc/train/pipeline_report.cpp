#include "llmc/train/pipeline_report.h"

#include <fmt/format.h>

#include "llmc/core/text.h"
#include "llmc/io/files.h"
#include "llmc/plan/pipeline_estimate.h"
#include "llmc/timeline/pipeline_timeline.h"
#include "llmc/train/prepared_run.h"

namespace llmc {

namespace {

// "interleaved, 4 stages of 2 chunks, 8 micro-batches"
std::string schedule_text(const RunPlan& plan) {
    const PipelineSpec& spec = plan.pipeline;
    return fmt::format("{}, {}{}, {}", schedule_name(plan), plural(spec.stages, "stage"),
                       spec.virtual_stages > 1 ? fmt::format(" of {} chunks", spec.virtual_stages) : "",
                       plural(spec.micro_batches, "micro-batch", "es"));
}

}  // namespace

TitledTimeline estimated_pipeline(const RunPlan& plan, std::optional<double> peak) {
    const std::string how =
        peak ? "at the device's peak speed" : "one block's forward pass is the unit of time";
    return {estimated_timeline(plan, peak),
            fmt::format("{}: estimated from the model's floating-point operations; {}", schedule_text(plan),
                        how)};
}

TitledTimeline measured_pipeline(const RunPlan& plan, const MeasuredPipeline& measured) {
    return {as_performed(plan, measured.timeline),
            fmt::format("{}: measured in step {}, the median of {}; clocks agree to {}", schedule_text(plan),
                        measured.step, plural(measured.steps, "step"), human_seconds(measured.clock_error))};
}

TitledTimeline simulated_pipeline(const RunPlan& plan, const MeasuredPipeline& measured) {
    const PipelineSpec& spec = plan.pipeline;
    Timeline timeline = as_performed(plan, simulate(spec, pipeline_passes(spec), measured.times));
    const double total = measured.timeline.total();
    std::string title = fmt::format(
        "{}: simulated with the median times of passes: {:.3f} of the measured time; {:.3f} with each "
        "step's mean times; {:.3f} with each pass's own time",
        schedule_text(plan), timeline.total() / total, measured.explained,
        replayed_timeline(spec, measured.passes).total() / total);
    return {std::move(timeline), std::move(title)};
}

std::string pass_times_text(const RunPlan& plan, const MeasuredPipeline& measured) {
    bool any = false;
    for (int chunk = 0; chunk < plan.pipeline.chunks(); ++chunk) any |= splits_backward(plan, chunk);
    const auto milliseconds = [](double seconds) { return fmt::format("{:.3f}", 1e3 * seconds); };
    std::string text = fmt::format("{:>5}  {:>5}  {:>10}  {:>10}{}  {:>10}   median ms of a pass\n", "chunk",
                                   "stage", "forward", any ? "inputs'" : "backward",
                                   any ? fmt::format("  {:>10}", "weights'") : "", "to send");
    for (int chunk = 0; chunk < plan.pipeline.chunks(); ++chunk) {
        const PassTimes& times = measured.times[static_cast<std::size_t>(chunk)];
        const std::string weights =
            splits_backward(plan, chunk) ? milliseconds(times.backward_weight) : "included";
        text += fmt::format("{:>5}  {:>5}  {:>10}  {:>10}{}  {:>10}\n", chunk, plan.pipeline.stage_of(chunk),
                            milliseconds(times.forward), milliseconds(times.backward_input),
                            any ? fmt::format("  {:>10}", weights) : "", milliseconds(times.communication));
    }
    return text;
}

std::vector<std::string> pipeline_files() {
    std::vector<std::string> files;
    for (const std::string_view name : {estimated_name, measured_name, simulated_name}) {
        for (const char* ending : {".svg", ".json"}) files.push_back(std::string(name) + ending);
    }
    return files;
}

void write_timeline(const std::filesystem::path& folder, std::string_view name, const TitledTimeline& drawn) {
    const std::filesystem::path file = folder / name;
    write_file(file.string() + ".svg", timeline_svg(drawn.timeline, drawn.title));
    write_file(file.string() + ".json", timeline_trace(drawn.timeline, drawn.title));
}

void show_expected(Console& console, const RunPlan& plan, std::optional<double> peak,
                   const std::optional<std::filesystem::path>& folder) {
    const TitledTimeline expected = estimated_pipeline(plan, peak);
    if (folder) write_timeline(*folder, estimated_name, expected);
    console.chart(expected.timeline, expected.title);
}

void show_measured(Console& console, const RunPlan& plan, const MeasuredPipeline& measured,
                   const std::optional<std::filesystem::path>& folder) {
    const TitledTimeline seen = measured_pipeline(plan, measured),
                         simulated = simulated_pipeline(plan, measured);
    console.text("\n");
    console.chart(seen.timeline, seen.title);
    console.chart(simulated.timeline, simulated.title);
    console.text(pass_times_text(plan, measured));
    if (!folder) return;
    write_timeline(*folder, measured_name, seen);
    write_timeline(*folder, simulated_name, simulated);
}

PipelineRecorder::PipelineRecorder(PreparedRun& run, std::optional<std::filesystem::path> folder)
    : run_(run), folder_(std::move(folder)) {
    if (!run.options.pipeline_timeline) return;
    show_expected(run.session.console(), run.plan, run.device().peak_flops(run.plan.spec.dtype), folder_);
    if (!run.trains) return;
    watch_.emplace(run.plan, run.session.world());
    run.trainer->watch_actions(true);
}

void PipelineRecorder::see(std::int64_t step) {
    if (watch_) watch_->see(step, run_.trainer->action_times());
}

void PipelineRecorder::show() {
    if (!watch_) return;
    if (const auto measured = watch_->gather())
        show_measured(run_.session.console(), run_.plan, *measured, folder_);
}

}  // namespace llmc
