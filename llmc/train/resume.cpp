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
#include "llmc/optim/schedule.h"
#include "llmc/train/command_line.h"
#include "llmc/train/outputs.h"
#include "llmc/train/setting_values.h"
#include "llmc/train/settings.h"

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
    if (options.out_dir.empty()) options.out_dir = run_with(plain_path(*options.resume)).string();
    options.resume = newest->directory.string();
}

void settle_from_checkpoint(Options& options) {
    const std::optional<CheckpointInfo> checkpoint = find_checkpoint(options, choose_out_dir(options));
    if (!checkpoint) return;
    take_model(options, *checkpoint);
    const auto then = nlohmann::ordered_json::parse(checkpoint->configuration);
    const auto take = [&](const char* name, auto& value) {
        if (!is_unset(value) || !then.contains(name) || then[name].is_null()) return;
        value = then[name].get<std::decay_t<decltype(value_of(value))>>();
        options.inherited.insert(name);
    };
    // An evaluation may run on a mesh that does not share the batch evenly.
    if (options.steps > 0) take("global-batch-tokens", options.global_batch_tokens);
    take("lr", options.learning_rate);
    take("warmup-steps", options.warmup_steps);
    take("dtype", options.dtype);
}

void settle_init(Options& options) {
    std::error_code ignored;
    if (!std::filesystem::is_directory(options.init, ignored)) return;
    naming_option("--init", [&] {
        const std::optional<CheckpointInfo> newest = newest_of_last_run(options.init);
        const CheckpointInfo checkpoint = newest ? *newest : read_checkpoint(options.init);
        options.init = checkpoint.directory.string();
        take_model(options, checkpoint);
    });
}

void take_model(Options& options, const CheckpointInfo& checkpoint) {
    const auto then = nlohmann::ordered_json::parse(checkpoint.configuration);
    if (!options.is_given("model")) {
        options.model = model_of(checkpoint);
        options.inherited.insert("model");
    }
    for (auto& [name, size] : options.of_model.sizes) {
        if (size || !then.contains(name) || !then[name].is_number()) continue;
        size = then[name].get<std::int64_t>();
        options.inherited.insert(name);
    }
    for (auto& [name, is_on] : options.of_model.switches) {
        if (options.is_given(name)) continue;
        is_on = then.value(name, true);  // a switch that the checkpoint does not know was on
        options.inherited.insert(name);
    }
    if (options.bpe_directory.empty() && then.contains("bpe-dir") && then["bpe-dir"].is_string())
        options.bpe_directory = then["bpe-dir"];
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

namespace {

// A note if the earlier run had reached the end of its schedule and the next step has a higher learning rate.
std::vector<std::string> rate_that_rises(const CheckpointInfo& checkpoint, const Options& options) {
    constexpr double clearly = 1.01;  // a smaller rise is no surprise
    const std::int64_t done = checkpoint.progress.step;
    const auto then = nlohmann::ordered_json::parse(checkpoint.configuration);
    const Options usual;
    Options earlier = options;
    earlier.steps = then.value("steps", usual.steps);
    earlier.schedule = then.value("lr-schedule", usual.schedule);
    earlier.min_lr_fraction = then.value("min-lr-fraction", usual.min_lr_fraction);
    if (then.contains("lr")) earlier.learning_rate = then["lr"].get<double>();
    if (then.contains("warmup-steps")) earlier.warmup_steps = then["warmup-steps"].get<std::int64_t>();
    const Choices known = schedule_names();  // a later version of the program may know more
    const bool is_known = std::ranges::find(known, earlier.schedule) != known.end();
    if (!is_known || earlier.schedule_kind() == ScheduleKind::constant) return {};
    if (done < earlier.steps || done >= options.steps) return {};
    const double last = learning_rate(schedule_of(earlier), done),
                 next = learning_rate(schedule_of(options), done + 1);
    if (next <= clearly * last) return {};
    return {fmt::format(
        "the learning rate rises from {:.3g} to {:.3g}, because the earlier schedule ended at step "
        "{}; to keep it, give{}",
        last, next, earlier.steps, options_that_keep_rate(earlier, done))};
}

}  // namespace

std::string options_that_keep_rate(const Options& options, std::int64_t step) {
    const Schedule schedule = schedule_of(options);
    if (schedule.kind == ScheduleKind::constant) return "";
    const double rate = learning_rate(schedule, step);
    // A schedule that ends at zero would train nothing any more.
    return fmt::format(" --lr-schedule constant --lr {:.3g}", rate > 0 ? rate : schedule.peak / 10);
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
    std::vector<std::string> notes = rate_that_rises(checkpoint, options);
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
