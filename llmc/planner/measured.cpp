#include "llmc/planner/measured.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/device/gpu_table.h"

namespace llmc {

namespace {

using Json = nlohmann::json;

struct MeasuredRun {
    std::int64_t processes = 0;
    std::string device;
    std::vector<double> seconds;  // of its steps
};

MeasuredRun read_run(const std::string& folder) {
    const std::string file = folder + "/metrics.jsonl";
    std::ifstream lines(file);
    if (!lines)
        user_error(
            "--measured {}: there is no {}; give the folder of a run, the seconds of a step, or a ratio such "
            "as x1.2",
            one_line(folder), one_line(file));
    MeasuredRun run;
    try {
        for (std::string line; std::getline(lines, line);) {
            const Json json = Json::parse(line);
            if (json.contains("run")) {
                const Json& described = json.at("run");
                run = {.processes = described.at("mesh").at("world").get<std::int64_t>(),
                       .device = described.at("device").get<std::string>(),
                       .seconds = {}};
            } else if (json.contains("step_ms")) {
                run.seconds.push_back(json.at("step_ms").get<double>() / 1e3);
                if (!(run.seconds.back() > 0))
                    user_error(
                        "--measured {}: a step of {} took {} ms; give another run, or the seconds of a step",
                        one_line(folder), one_line(file), 1e3 * run.seconds.back());
            }
        }
    } catch (const Json::exception&) {
        user_error("--measured {}: {} is damaged after {}; give another run, or the seconds of a step",
                   one_line(folder), one_line(file), plural(std::ssize(run.seconds), "step"));
    }
    if (run.seconds.empty())
        user_error("--measured {}: {} has no step; give the folder of a run, or the seconds of a step",
                   one_line(folder), one_line(file));
    return run;
}

double median(std::vector<double> values) {
    std::ranges::sort(values);
    const std::size_t half = values.size() / 2;
    return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

// The plan of a command line; UserError if its time is not planned.
PlannedRun planned(const std::string& asked, const std::vector<std::string>& arguments) {
    std::string unused;
    std::optional<PlannedRun> run = planned_run(arguments, unused);
    if (!run || !run->estimate)
        user_error(
            "--measured {}: the time of a step of these options is not planned, so nothing can be compared",
            one_line(asked));
    return *std::move(run);
}

}  // namespace

double measured_ratio(const std::vector<std::string>& arguments, const PlannedRun& given, std::string& text) {
    const std::string& asked = given.asked.measured;
    std::vector<std::string> words = arguments;
    double seconds = 0;
    if (const auto number = given.asked.measured_seconds()) {
        seconds = *number;
    } else {
        const MeasuredRun run = read_run(asked);
        const GpuModel* const gpu = gpu_of_driver(run.device);
        if (run.device.find(", CUDA ") == std::string::npos)
            user_error("--measured {}: it ran on CPUs ({}), whose times are not planned; give a run on GPUs",
                       one_line(asked), one_line(run.device));
        if (gpu == nullptr && given.asked.gpu.empty())
            user_error("--measured {}: it ran on {}, which is no GPU that plans know; name one by --gpu",
                       one_line(asked), one_line(run.device));
        words = {arguments.front(), "--config", asked + "/config.toml",
                 fmt::format("--gpu={}", gpu ? gpu->name : gpu_names(given.asked).front()),
                 fmt::format("--gpus={}", run.processes)};
        if (given.asked.network) words.push_back(fmt::format("--network={}", *given.asked.network));
        seconds = median(run.seconds);
        text = fmt::format("the median of {}, ", plural(std::ssize(run.seconds), "step"));
    }
    words.emplace_back("--measured=x1");
    const PlannedRun plan = planned(asked, words);
    const double expected = plan.estimate->expected;
    if (!plan.why_not.empty())
        user_error(
            "--measured {}: a run of these options breaks a rule ({}), so that no step of it was measured; "
            "give its options, or a ratio such as x1.2",
            one_line(asked), plan.why_not.front().rule);
    if (seconds < *plan.estimate->bound)
        user_error(
            "--measured {}: a step of {} is faster than the {} that this GPU takes at least; see whether its "
            "options are given",
            one_line(asked), human_seconds(seconds), human_seconds(*plan.estimate->bound));
    const double ratio = seconds / expected;
    text += fmt::format(
        "{} for {} tokens, is {:.3g} times the {} planned; all times here are multiplied by that",
        human_seconds(seconds), grouped(plan.spec->global_batch_tokens), ratio, human_seconds(expected));
    return ratio;
}

}  // namespace llmc
