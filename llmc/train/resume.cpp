#include "llmc/train/resume.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>

#include "llmc/core/error.h"
#include "llmc/io/files.h"
#include "llmc/io/last_run.h"
#include "llmc/train/command_line.h"

namespace llmc {

namespace {

// The settings that change what the next steps compute.
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

void naming_a_whole_one(const Options& options, const std::filesystem::path& out_dir,
                        const std::function<void()>& resume) {
    try {
        resume();
    } catch (const UserError& fault) {
        const std::optional<CheckpointInfo> whole = newest_whole_checkpoint(
            options.resume->empty() ? out_dir : plain_path(*options.resume).parent_path());
        if (!whole) throw;
        user_error("{}; the newest whole one: --resume {}", fault.what(),
                   shell_word(whole->directory.string()));
    }
}

namespace {

std::optional<CheckpointInfo> newest_of_last_run(const std::filesystem::path& out_dir) {
    const std::optional<RunRecord> last = read_last_run(out_dir);
    if (!last) return newest_checkpoint(out_dir, std::nullopt);
    if (auto newest = newest_checkpoint(out_dir, last->identity)) return newest;
    // What it began from may have gone since.
    std::error_code ignored;
    if (!last->began_from.empty() && std::filesystem::exists(last->began_from, ignored))
        return read_checkpoint(last->began_from);
    return newest_checkpoint(out_dir, std::nullopt);
}

}  // namespace

std::optional<CheckpointInfo> find_checkpoint(const Options& options, const std::filesystem::path& out_dir) {
    if (!options.resume) return std::nullopt;
    std::optional<CheckpointInfo> found;
    naming_a_whole_one(options, out_dir, [&] {
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
    if (!newest) return;  // it is a checkpoint itself, or nothing
    if (options.out_dir.empty()) options.out_dir = *options.resume;
    options.resume = newest->directory.string();
}

std::string model_of(const CheckpointInfo& checkpoint) {
    const std::vector<std::string> known = model_names();
    const auto then = nlohmann::ordered_json::parse(checkpoint.configuration);
    std::string model = then.value("model", Options().model);
    if (std::ranges::find(known, model) == known.end())
        user_error(
            "{} is of --model {}, which this program does not know; it takes the program that wrote it",
            checkpoint.directory.string(), model);
    return model;
}

std::vector<std::string> differences(const CheckpointInfo& checkpoint, const Options& options) {
    const auto now = to_json(options), then = nlohmann::ordered_json::parse(checkpoint.configuration);
    const auto differs = [&](const char* name) { return then.contains(name) && then[name] != now[name]; };
    const std::string model = model_of(checkpoint);
    if (family_of(model).name != family_of(options.model).name)
        user_error("{} is of another family of models, that of --model {}; give that, not --model {}",
                   checkpoint.directory.string(), model, options.model);
    for (const FamilyOption& option : family_options()) {
        const char* const name = option.name.data();
        if (option.is_switch()) {
            // A switch that a checkpoint does not know was on.
            const bool was_on = then.value(name, true);
            if (was_on == now[name].get<bool>()) continue;
            user_error("{} is of another model, with --{}={}; {} --{}=false", checkpoint.directory.string(),
                       name, was_on, was_on ? "leave out" : "give", name);
        }
        if (differs(name)) {
            user_error("{} is of another model: its --{} is {}, this run's {}", checkpoint.directory.string(),
                       name, then[name].dump(), now[name].dump());
        }
    }
    // With no steps at all a checkpoint is evaluated.
    if (options.steps > 0 && checkpoint.progress.step > options.steps) {
        user_error("{} stands after step {}, beyond --steps {}; give more steps, or 0 to evaluate it",
                   checkpoint.directory.string(), checkpoint.progress.step, options.steps);
    }
    std::vector<std::string> notes;
    if (!options.init.empty() && differs("init"))
        notes.push_back(
            fmt::format("--init {} is passed over: the weights are the checkpoint's", options.init));
    for (const char* name : step_settings) {
        if (differs(name)) {
            notes.push_back(fmt::format("--{} is {}, in the checkpoint it was {}", name, now[name].dump(),
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
            "rank {} stands at step {} and rank 0 at step {}: the processes do not see the same checkpoint; "
            "give an --out-dir that all machines share",
            world.rank(), step, common);
    }
}

}  // namespace llmc
