#include "llmc/train/resume.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>

#include "llmc/core/error.h"
#include "llmc/io/checkpoint.h"
#include "llmc/io/files.h"
#include "llmc/train/command_line.h"

namespace llmc {

namespace {

// The settings that change the results of the next steps.
constexpr std::array step_settings = {"train-data",
                                      "steps",
                                      "global-batch-tokens",
                                      "dtype",
                                      "gradient-dtype",
                                      "reduce-every",
                                      "stochastic-rounding",
                                      "seed",
                                      "lr",
                                      "warmup-steps",
                                      "lr-schedule",
                                      "min-lr-fraction",
                                      "beta1",
                                      "beta2",
                                      "weight-decay",
                                      "eps",
                                      "grad-clip"};

}  // namespace

void suggesting_complete_checkpoint(const Options& options, const std::filesystem::path& out_dir,
                                    const std::function<void()>& resume) {
    try {
        resume();
    } catch (const UserError& fault) {
        const std::optional<CheckpointInfo> whole = newest_whole_checkpoint(
            options.resume->empty() ? out_dir : plain_path(*options.resume).parent_path());
        if (!whole) throw;
        user_error("{}; to use the newest whole checkpoint: --resume {}", fault.what(),
                   shell_word(whole->directory.string()));
    }
}

namespace {

std::optional<CheckpointInfo> newest_of_last_run(const std::filesystem::path& out_dir) {
    const std::optional<RunRecord> last = read_last_run(out_dir);
    if (!last) return newest_checkpoint(out_dir, std::nullopt);
    if (auto newest = newest_checkpoint(out_dir, last->identity)) return newest;
    // The checkpoint that the run resumed from may be deleted by now.
    std::error_code ignored;
    if (!last->began_from.empty() && std::filesystem::exists(last->began_from, ignored))
        return read_checkpoint(last->began_from);
    return newest_checkpoint(out_dir, std::nullopt);
}

}  // namespace

std::optional<CheckpointInfo> find_checkpoint(const Options& options, const std::filesystem::path& out_dir) {
    if (!options.resume) return std::nullopt;
    std::optional<CheckpointInfo> found;
    suggesting_complete_checkpoint(options, out_dir, [&] {
        found = options.resume->empty() ? newest_of_last_run(out_dir) : read_checkpoint(*options.resume);
    });
    return found;
}

void settle_resume(Options& options) {
    std::error_code ignored;
    if (!options.resume || options.resume->empty() ||
        !std::filesystem::is_directory(*options.resume, ignored))
        return;
    Options alone = options;
    alone.resume = "";
    const std::optional<CheckpointInfo> newest = find_checkpoint(alone, *options.resume);
    if (!newest) return;  // the directory is itself a checkpoint, or holds none
    if (options.out_dir.empty()) options.out_dir = *options.resume;
    options.resume = newest->directory.string();
}

std::string model_of(const CheckpointInfo& checkpoint) {
    const std::vector<std::string> known = model_names();
    const auto then = nlohmann::ordered_json::parse(checkpoint.configuration);
    std::string model = then.value("model", Options().model);
    if (std::ranges::find(known, model) == known.end())
        user_error("{} has --model {}, which this program does not know; use the program that wrote it",
                   checkpoint.directory.string(), model);
    return model;
}

std::vector<std::string> differences(const CheckpointInfo& checkpoint, const Options& options) {
    const auto now = to_json(options), then = nlohmann::ordered_json::parse(checkpoint.configuration);
    const auto differs = [&](const char* name) { return then.contains(name) && then[name] != now[name]; };
    const std::string model = model_of(checkpoint);
    if (family_of(model).name != family_of(options.model).name)
        user_error("{} belongs to --model {}, which is of another family than --model {}; give --model {}",
                   checkpoint.directory.string(), model, options.model, model);
    for (const FamilyOption& option : family_options()) {
        const char* const name = option.name.data();
        if (option.is_switch()) {
            // A switch that is missing in the checkpoint was on.
            const bool was_on = then.value(name, true);
            if (was_on == now[name].get<bool>()) continue;
            user_error("{} has another model, with --{}={}; {} --{}=false", checkpoint.directory.string(),
                       name, was_on, was_on ? "leave out" : "give", name);
        }
        if (differs(name)) {
            user_error("{} has another model: its --{} is {}, this run's is {}; give the checkpoint's sizes",
                       checkpoint.directory.string(), name, then[name].dump(), now[name].dump());
        }
    }
    // --steps 0 evaluates a checkpoint.
    if (options.steps > 0 && checkpoint.progress.step > options.steps) {
        user_error("{} is at step {}, beyond --steps {}; give more steps, or 0 to evaluate it",
                   checkpoint.directory.string(), checkpoint.progress.step, options.steps);
    }
    std::vector<std::string> notes;
    if (!options.init.empty() && differs("init"))
        notes.push_back(
            fmt::format("--init {} is ignored: the checkpoint has its own weights", options.init));
    for (const char* name : step_settings) {
        if (differs(name)) {
            notes.push_back(fmt::format("--{} is {}, but was {} in the checkpoint", name, now[name].dump(),
                                        then[name].dump()));
        }
    }
    return notes;
}

void require_same_step(Communicator& world, std::int64_t step) {
    auto common = static_cast<double>(step);
    world.broadcast({reinterpret_cast<std::byte*>(&common), DType::fp64, {1}}, 0);
    if (static_cast<double>(step) != common) {
        user_error(
            "rank {} is at step {} and rank 0 at step {}: the processes do not see the same checkpoint; "
            "give an --out-dir that all machines share",
            world.rank(), step, common);
    }
}

}  // namespace llmc
