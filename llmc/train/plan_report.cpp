#include "llmc/train/plan_report.h"

#include <fmt/format.h>

#include <filesystem>
#include <string>

#include "llmc/io/files.h"
#include "llmc/train/outputs.h"
#include "llmc/train/pipeline_report.h"

namespace llmc {

namespace {

std::string lists_of_stages(RunSpec spec, const Ops& ops, std::size_t staging) {
    std::string text;
    for (int stage = 0; stage < spec.mesh.pipeline; ++stage) {
        spec.mesh.rank = spec.mesh.rank_of(stage, 0, 0);
        const RunPlan plan = plan_run(spec, ops, staging);
        text += fmt::format("{}{}", stage > 0 ? "\n" : "", to_string(plan.training));
    }
    return text;
}

}  // namespace

void show_plan(const Options& options, const RunPlan& plan, Device& device, std::size_t staging,
               Console& console) {
    if (options.print_step) {
        console.text(lists_of_stages(plan.spec, device.ops(), staging));
        return;
    }
    std::filesystem::path folder = choose_out_dir(options);
    naming_option("--out-dir", [&] {
        if (options.out_dir.empty()) folder = claim_directory(folder);
        make_directory(folder);
        show_expected(console, plan, device.peak_flops(plan.spec.dtype), folder);
    });
    console.note(fmt::format("drawn in {}/{}.svg, and as a trace in .json", folder.string(), estimated_name));
}

}  // namespace llmc
