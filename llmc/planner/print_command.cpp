// --print-model, --print-step, and --pipeline-timeline with --steps 0: what a run would do, without a run.
#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>

#include "llmc/core/error.h"
#include "llmc/io/files.h"
#include "llmc/parallel/step/build_step.h"
#include "llmc/plan/micro_batches.h"
#include "llmc/plan/whole_pipeline.h"
#include "llmc/planner/plan_command.h"
#include "llmc/planner/planned_run.h"
#include "llmc/train/outputs.h"
#include "llmc/train/pipeline_report.h"
#include "llmc/train/report.h"

namespace llmc {

namespace {

// The plan of the whole pipeline, without its lists.
RunPlan plan_of_step(const PlannedRun& run) {
    const RunNeeds needs = needs_of(*run.spec, *run.machines.sizes, run.staging_bytes);
    check_micro_batches(*run.spec, needs.micro_batch);
    return plan_of_whole_pipeline(*run.spec, needs.micro_batch);
}

std::string lists_of_stages(const RunPlan& plan, bool are_whole) {
    std::string text;
    for (int stage = 0; stage < plan.spec.mesh.pipeline; ++stage)
        text += fmt::format("{}{}", stage > 0 ? "\n" : "",
                            to_string(build_training_step(step_spec(plan, stage)), are_whole));
    return text;
}

// Writes the chart's files to the results' folder, if it holds no run.
void show_timeline(Console& console, const PlannedRun& run) {
    const RunPlan plan = plan_of_step(run);
    const DType dtype = run.spec->dtype;
    std::optional<double> peak;
    if (run.machines.gpu) peak = run.machines.gpu->peak(dtype, run.options.tf32);
    std::filesystem::path folder = choose_out_dir(run.options);
    require_no_checkpoint(folder);
    if (holds_run(folder)) {
        show_expected(console, plan, peak, std::nullopt);
        console.note(
            fmt::format("{} holds a run, so the timeline is not written there; for its files, choose "
                        "another --out-dir",
                        folder.string()));
        return;
    }
    naming_option("--out-dir", [&] {
        if (run.options.out_dir.empty()) folder = claim_directory(folder);
        make_directory(folder);
        show_expected(console, plan, peak, folder);
    });
    console.note(fmt::format("the timeline is in {0}/{1}.svg, and as a trace in {0}/{1}.json",
                             folder.string(), estimated_name));
}

}  // namespace

bool print_instead_of_run(Console& console, const std::vector<std::string>& arguments) {
    PlannedRun run;
    std::string text;
    if (!prepare(run, arguments, text) || !run.options.plans_only()) return false;
    if (run.options.print_model) {
        console.text(model_text(*run.spec, *run.machines.sizes));
    } else if (run.options.print_step) {
        console.text(lists_of_stages(plan_of_step(run), run.options.verbose));
    } else {
        show_timeline(console, run);
    }
    return true;
}

}  // namespace llmc
