#include "llmc/train/resume.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/io/checkpoint.h"
#include "llmc/io/files.h"
#include "llmc/optim/schedule.h"
#include "llmc/train/adapter_options.h"
#include "llmc/train/command_line.h"
#include "llmc/train/outputs.h"
#include "llmc/train/settings.h"
#include "llmc/train/stop.h"

namespace llmc {

namespace {

// The settings that change the results of the next steps.
const std::vector<const char*>& step_settings() {
    static const std::vector<const char*> all = [] {
        std::vector<const char*> names = {"train-data",
                                          "steps",
                                          "global-batch-tokens",
                                          "dtype",
                                          "gradient-dtype",
                                          "moments-dtype",
                                          "master-dtype",
                                          "fp8",
                                          "fp8-history",
                                          "loss-scale",
                                          "initial-loss-scale",
                                          "loss-scale-window",
                                          "loss-scale-hysteresis",
                                          "reduce-every",
                                          "stochastic-rounding",
                                          "attention",
                                          "tf32",
                                          "seed",
                                          "lr",
                                          "warmup-steps",
                                          "lr-schedule",
                                          "min-lr-fraction",
                                          "optimizer",
                                          "weight-decay",
                                          "grad-clip"};
        for (const HyperparameterOption& option : hyperparameter_options())
            names.push_back(option.name.data());
        return names;
    }();
    return all;
}

}  // namespace

void suggesting_complete_checkpoint(const Options& options, const std::filesystem::path& out_dir,
                                    const std::function<void()>& resume) {
    try {
        resume();
    } catch (const UserError& fault) {
        const bool names_run =
            !options.resume->empty() && !is_checkpoint_name(plain_path(*options.resume).filename().string());
        if (names_run) throw;
        const std::filesystem::path folder =
            options.resume->empty() ? out_dir : plain_path(*options.resume).parent_path();
        std::vector<CheckpointInfo> found = readable_checkpoints(folder);
        if (!holds_run(folder / best_folder))
            std::ranges::move(readable_checkpoints(folder / best_folder), std::back_inserter(found));
        sort_newest_first(found);
        const std::optional<CheckpointInfo> whole = newest_whole(found);
        if (!whole) throw;
        user_error("{}; to use the newest whole checkpoint: --resume {}", fault.what(),
                   shell_word(whole->directory.string()));
    }
}

std::optional<CheckpointInfo> newest_of_last_run(const std::filesystem::path& out_dir,
                                                 const Damages& damages) {
    const std::optional<RunRecord> last = read_last_run(out_dir);
    if (!last) return newest_of_run(out_dir, std::nullopt, damages);
    // The checkpoint that the run resumed from may be deleted by now.
    std::error_code ignored;
    const bool has_start = !last->began_from.empty() && std::filesystem::exists(last->began_from, ignored);
    const auto damage = has_start ? damages.find(plain_path(last->began_from).string()) : damages.end();
    try {
        if (auto newest = newest_of_run(out_dir, last->identity, damages)) return newest;
    } catch (const UserError&) {  // all there are damaged
        if (!has_start || damage != damages.end()) throw;
    }
    // Others would be of another run, or of steps that this one has left behind.
    if (damage != damages.end()) throw UserError(damage->second);
    if (has_start) return read_checkpoint(last->began_from);
    return newest_of_run(out_dir, std::nullopt, damages);
}

std::string verified(const std::filesystem::path& directory) {
    const std::optional<CheckpointInfo> newest = newest_of_last_run(directory);
    const std::filesystem::path of = newest ? newest->directory : directory;
    if (newest) {
        const std::string damage = damage_after(directory, newest->progress.step, {});
        if (!damage.empty()) throw UserError(damage);
    }
    const VerifiedCheckpoint whole = verify_checkpoint(of);
    return fmt::format("{} is whole: step {}, {}, {}", of.string(), grouped(whole.step),
                       plural(whole.files, "file"), plural(static_cast<std::int64_t>(whole.bytes), "byte"));
}

std::optional<CheckpointInfo> find_checkpoint(const Options& options, const std::filesystem::path& out_dir) {
    if (!options.resume) return std::nullopt;
    std::optional<CheckpointInfo> found;
    suggesting_complete_checkpoint(options, out_dir, [&] {
        found = options.resume->empty() ? newest_of_last_run(out_dir, options.damages)
                                        : read_checkpoint(*options.resume);
    });
    return found;
}

namespace {

// Whether a run that resumes, and `trains` or only evaluates, keeps a setting of the run that saved the
// checkpoint. It keeps those that change the results, and those that say when it validates, samples and saves.
// The mesh, the device and the use of memory may be others.
bool is_kept(std::string_view name, bool trains, bool was_given) {
    constexpr std::array evaluation_settings = {
        "train-data",  "val-data",    "val-batches", "global-batch-tokens", "dtype",     "fp8",
        "fp8-history", "attention",   "tf32",        "optimizer",           "lora-rank", "lora-alpha",
        "lora-rslora", "lora-layers", "base-dtype"};
    constexpr std::array training_settings = {
        "val-every",    "eval-hellaswag", "eval-every",       "eval-examples",
        "sample-every", "sample-tokens",  "prompt",           "temperature",
        "top-k",        "top-p",          "checkpoint-every", "checkpoint-async",
        "keep-last",    "keep-best",      "log-every",        "micro-batch-size"};
    const auto has = [&](const auto& names) { return std::ranges::find(names, name) != names.end(); };
    // Its default depends on the mesh.
    if (name == "reduce-every") return trains && was_given;
    return has(evaluation_settings) || (trains && (has(step_settings()) || has(training_settings)));
}

}  // namespace

namespace {

void require_same_optimizer(const CheckpointInfo& checkpoint, const std::string& then,
                            const Options& options) {
    const std::vector<std::string> known = optimizer_names();
    if (std::ranges::find(known, then) == known.end())
        user_error("{} has --optimizer {}, which this program does not know; use the program that wrote it",
                   checkpoint.directory.string(), then);
    if (options.is_given("optimizer") && options.optimizer != then)
        user_error(
            "{} has the state of --optimizer {}, with which --optimizer {} cannot go on; leave it out, or "
            "begin a "
            "new run from these weights with --init {}",
            checkpoint.directory.string(), then, options.optimizer,
            shell_word(checkpoint.directory.string()));
}

}  // namespace

void take_checkpoint(Options& options, const Sources& sources) {
    const CheckpointInfo& checkpoint = *sources.checkpoint;
    if (!take_model(options, checkpoint)) return;
    const auto then = nlohmann::ordered_json::parse(checkpoint.configuration);
    require_same_optimizer(checkpoint, then.value("optimizer", Options().optimizer), options);
    const auto& given = sources.given_then;
    const Options now = options;
    const auto json = to_json(now);
    const bool trains = options.steps > 0;
    const auto is_changed = [&](const char* name) {
        return now.is_given(name) && then.contains(name) && then[name] != json[name];
    };
    // Whether a setting belongs to the value of another one that is given and differs.
    constexpr std::array adaptive_scale = {"initial-loss-scale", "loss-scale-window",
                                           "loss-scale-hysteresis"};
    const auto goes_with_another = [&](std::string_view name) {
        if (name == "val-data") return is_changed("train-data");
        if (name == "gradient-dtype" || name == "master-dtype" || name == "fp8" ||
            name == "stochastic-rounding" || name == "attention" || name == "tf32")
            return is_changed("dtype");
        // A fixed scale and one that adapts exclude each other.
        if (name == "loss-scale")
            return std::ranges::any_of(adaptive_scale,
                                       [&](const char* other) { return now.is_given(other); });
        if (std::ranges::find(adaptive_scale, name) != adaptive_scale.end())
            return now.is_given("loss-scale") ||
                   (then.contains("loss-scale") && !then["loss-scale"].is_null());
        return name == "keep-best" && now.val_every == 0;
    };
    for_each_setting(options, no_group, [&](const char* name, auto& value, const Help&, const Choices&) {
        if (now.is_given(name) || !is_kept(name, trains, given.contains(name)) || goes_with_another(name))
            return;
        if (!then.contains(name) || then[name].is_null()) return;
        value = then[name].get<std::decay_t<decltype(value_of(value))>>();
        options.inherited[name] = false;
    });
    // What was given then may have no effect beside what is given now.
    for (const DependentSetting& setting : dependent_settings()) {
        const auto inherited = options.inherited.find(setting.name);
        if (inherited == options.inherited.end() || setting.has_effect(options)) continue;
        setting.drop(options);
        options.inherited.erase(inherited);
    }
    for (auto& [name, was_given] : options.inherited) was_given = given.contains(name);
    // The configuration goes on naming this run, although its directory may have moved, and the weights from
    // which it began.
    if (trains && !now.is_given("out-dir") && given.contains("out-dir")) {
        options.out_dir = sources.results;
        options.inherited["out-dir"] = true;
    }
    if (checkpoint.base) {
        take_base(options, sources, then);
    } else if (now.is_given("init") && then.contains("init") && then["init"] != json["init"])
        options.notes.push_back(
            fmt::format("--init {} is ignored: the checkpoint has its own weights", now.init));
    if (!checkpoint.base)
        options.init = trains && given.contains("init") && then["init"].is_string() ? then["init"] : "";
    if (!options.init.empty()) options.inherited["init"] = true;
    // An evaluation may run on a mesh that cannot share the batch evenly.
    if (!trains && options.inherited.contains("global-batch-tokens"))
        options.inherited["global-batch-tokens"] = false;
}

bool take_model(Options& options, const CheckpointInfo& checkpoint) {
    const auto then = nlohmann::ordered_json::parse(checkpoint.configuration);
    const std::string model = model_of(checkpoint);
    // Another model that was asked for has its own sizes. They do not fit the checkpoint, and a message says so.
    if (options.is_given("model") && options.model != model && is_known_model(options.model)) return false;
    // The checkpoint holds the architecture of a folder, which may be gone.
    if (!is_known_model(options.model)) options.model_folder = std::exchange(options.model, model);
    if (!options.is_given("model")) {
        options.model = model;
        options.inherited["model"] = false;
    }
    if (then.contains("folder"))
        options.folder = {then["folder"].value("path", ""), then["folder"].value("config", "")};
    for (auto& [name, option] : options.model_options) {
        if (!then.contains(name) || then[name].is_null())
            continue;  // the checkpoint is older than the option
        std::visit(
            [&, &name = name]<class T>(std::optional<T>& value) {
                if (value) return;
                value = then[name].template get<T>();
                options.inherited[name] = false;
            },
            option);
    }
    options.tokenizer_of_checkpoint = tokenizer_in(checkpoint).string();
    // A configuration file names the folder of its day.
    if (!options.tokenizer_of_checkpoint.empty() && !options.given.contains("tokenizer") &&
        !options.tokenizer.empty() && !std::filesystem::exists(options.tokenizer)) {
        options.notes.push_back(fmt::format("there is no {} any more; the checkpoint's own tokenizer is used",
                                            options.tokenizer));
        options.tokenizer.clear();
    }
    for (const char* const name :
         {"tokenizer", "bpe-dir"}) {  // a checkpoint of an earlier program has only a name
        if (!options.tokenizer_of_checkpoint.empty()) break;
        if (options.tokenizer.empty() && then.contains(name) && then[name].is_string())
            options.tokenizer = then[name];
    }
    return true;
}

std::string model_of(const CheckpointInfo& checkpoint) {
    const auto then = nlohmann::ordered_json::parse(checkpoint.configuration);
    std::string model = then.value("model", Options().model);
    if (!is_known_model(model))
        user_error("{} has --model {}, which this program does not know; use the program that wrote it",
                   checkpoint.directory.string(), model);
    return model;
}

namespace {

// A note if the next step has a higher learning rate than the last one, and than the earlier schedule would give it.
std::vector<std::string> rate_that_rises(const CheckpointInfo& checkpoint, const Options& options) {
    constexpr double clearly = 1.01;                          // a smaller rise is no surprise
    const std::int64_t done = checkpoint.progress.applied();  // the schedule counts these
    const auto then = nlohmann::ordered_json::parse(checkpoint.configuration);
    const Options defaults;
    Options earlier = options;
    earlier.steps = then.value("steps", defaults.steps);
    earlier.schedule = then.value("lr-schedule", defaults.schedule);
    earlier.min_lr_fraction = then.value("min-lr-fraction", defaults.min_lr_fraction);
    if (then.contains("lr")) earlier.learning_rate = then["lr"].get<double>();
    if (then.contains("warmup-steps")) earlier.warmup_steps = then["warmup-steps"].get<std::int64_t>();
    const Choices known = schedule_names();  // a later version of the program may know more
    const bool is_known = std::ranges::find(known, earlier.schedule) != known.end();
    if (!is_known || earlier.schedule_kind() == ScheduleKind::constant) return {};
    if (checkpoint.progress.step >= options.steps) return {};
    const Schedule before = schedule_of(earlier), now = schedule_of(options);
    const double last = learning_rate(before, done), next = learning_rate(now, done + 1);
    // The earlier schedule itself rises during warmup.
    if (next <= clearly * std::max(last, learning_rate(before, done + 1))) return {};
    const std::string rise = fmt::format("the learning rate rises from {:.3g} to {:.3g}", last, next);
    if (options.given.contains("lr") && options.learning_rate != earlier.learning_rate) return {rise};
    const std::string reason =
        done >= earlier.steps ? fmt::format("the earlier schedule ended at step {}", earlier.steps)
        : before.total_steps != now.total_steps
            ? fmt::format("the schedule has {} steps instead of {}", options.steps, earlier.steps)
            : "the schedule has changed";
    return {fmt::format("{}, because {}; to keep it, give{}", rise, reason,
                        options_that_keep_rate(earlier, done))};
}

std::string as_text(const nlohmann::ordered_json& value) {
    return value.is_null() ? "not given" : value.dump();
}

}  // namespace

std::string options_that_keep_rate(const Options& options, std::int64_t step) {
    const Schedule schedule = schedule_of(options);
    if (schedule.kind == ScheduleKind::constant) return "";
    // A schedule that ends at zero would train nothing any more.
    const double reached = learning_rate(schedule, step) / schedule.peak, share = reached > 0 ? reached : 0.1;
    const Optimizer& optimizer = options.optimizer_used();
    const std::string own =
        optimizer.own_rate_name.empty() || !options.is_given(optimizer.own_rate_name)
            ? ""
            : fmt::format(" --{} {:.3g}", optimizer.own_rate_name,
                          share * optimizer.own_rate(schedule.peak, options.numbers_of(optimizer)));
    return fmt::format(" --lr-schedule constant --lr {:.3g}{}", share * schedule.peak, own);
}

void require_same_model(const CheckpointInfo& checkpoint, const Options& options) {
    const auto now = to_json(options), then = nlohmann::ordered_json::parse(checkpoint.configuration);
    const std::string model = model_of(checkpoint);
    if (family_of(model).name != family_of(options.model).name)
        user_error("{} belongs to --model {}, which is of another family than --model {}; give --model {}",
                   checkpoint.directory.string(), model, options.model, model);
    const ModelChoices defaults = choices_of(model);
    for (const FamilyOption& option : family_of(model).options) {
        const char* const name = option.name.data();
        if (option.kind == OptionKind::on_off) {
            // A checkpoint that does not know a switch has the model's default.
            const bool was_on = then.value(name, defaults.is_on(name)), is_on = now[name].get<bool>();
            if (was_on == is_on) continue;
            const bool is_default = was_on == defaults.is_on(name);
            user_error("{} has another model, with --{}={}; {} --{}={}", checkpoint.directory.string(), name,
                       was_on, is_default ? "leave out" : "give", name, is_default ? is_on : was_on);
        }
        if (then.contains(name) && then[name] != now[name]) {
            user_error("{} has another model: its --{} is {}, this run's is {}; give the checkpoint's sizes",
                       checkpoint.directory.string(), name, then[name].dump(), now[name].dump());
        }
    }
    require_same_adapters(checkpoint, options, then, now);
}

std::vector<std::string> differences(const CheckpointInfo& checkpoint, const Options& options) {
    require_same_model(checkpoint, options);
    const auto now = to_json(options), then = nlohmann::ordered_json::parse(checkpoint.configuration);
    const auto differs = [&](const char* name) { return then.contains(name) && then[name] != now[name]; };
    // --steps 0 evaluates a checkpoint.
    if (options.steps > 0 && checkpoint.progress.step > options.steps) {
        user_error("{} is at step {}, beyond --steps {}; give more steps, or 0 to evaluate it",
                   checkpoint.directory.string(), checkpoint.progress.step, options.steps);
    }
    std::vector<std::string> notes = rate_that_rises(checkpoint, options);
    if (options.steps > 0 && options.dtype == "fp16" && !options.loss_scale &&
        !checkpoint.progress.loss_scale)
        notes.emplace_back("the checkpoint has no loss scale, so it starts afresh");
    if (options.steps > 0 && options.fp8 == "delayed" && !checkpoint.progress.fp8)
        notes.emplace_back(
            "the checkpoint has no history of products in 8 bits, so their scales start afresh");
    if (differs("val-data") && then["val-data"].is_null() != now["val-data"].is_null()) {
        notes.push_back(fmt::format(
            "--val-data is {}, but was {} in the checkpoint; without it, the last tenth of a training "
            "text is for validation",
            as_text(now["val-data"]), as_text(then["val-data"])));
    }
    if (differs("keep-best") && options.val_every == 0)
        notes.emplace_back("--keep-best is off from now on: it needs validations, and --val-every is 0");
    for (const char* name : step_settings()) {
        // The data themselves are compared if the checkpoint has a record of them: they may have been moved.
        if (name == std::string_view("train-data") && options.steps > 0 && !checkpoint.data.empty()) continue;
        // A batch that was not given differs if this mesh cannot share it, and a note says so.
        if (name == std::string_view("global-batch-tokens") && !options.was_chosen(name)) continue;
        if (differs(name) && (options.steps > 0 || is_kept(name, false, false))) {
            const bool follows_stage = name == std::string_view("reduce-every") && !options.is_given(name);
            notes.push_back(fmt::format(
                "--{} is {}, but was {} in the checkpoint{}", name, as_text(now[name]), as_text(then[name]),
                follows_stage ? "; it follows --zero-stage and --pipeline-schedule, unless it is given"
                              : ""));
        }
    }
    return notes;
}

bool scales_otherwise(const CheckpointInfo& checkpoint, const Options& options) {
    const auto now = to_json(options), then = nlohmann::ordered_json::parse(checkpoint.configuration);
    return std::ranges::any_of(std::array{"dtype", "fp8", "loss-scale"}, [&](const char* name) {
        return then.contains(name) && then[name] != now[name];
    });
}

namespace {

double step_of_rank_zero(Communicator& world, std::int64_t step) {
    auto common = static_cast<double>(step);
    world.broadcast({reinterpret_cast<std::byte*>(&common), DType::fp64, {1}}, 0);
    return common;
}

}  // namespace

bool is_same_step(Communicator& world, std::int64_t step) {
    return !on_any_rank(world, static_cast<double>(step) != step_of_rank_zero(world, step));
}

void require_same_step(Communicator& world, std::int64_t step) {
    const double common = step_of_rank_zero(world, step);
    if (static_cast<double>(step) != common) {
        user_error(
            "rank {} is at step {} and rank 0 at step {}: the processes do not see the same checkpoint; "
            "give an --out-dir that all machines share",
            world.rank(), step, common);
    }
}

}  // namespace llmc
