#include "llmc/train/sources.h"

#include <fmt/format.h>

#include <system_error>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/io/files.h"
#include "llmc/io/model_files.h"
#include "llmc/io/stored_tensors.h"
#include "llmc/model/family.h"
#include "llmc/train/command_line.h"
#include "llmc/train/config_file.h"
#include "llmc/train/outputs.h"
#include "llmc/train/resume.h"

namespace llmc {

namespace {

namespace fs = std::filesystem;

// The config.toml of a run means that run, also if the run was moved or copied there.
std::string run_of_config(const Options& options) {
    fs::path file = options.config_file;
    std::error_code ignored;
    if (fs::is_symlink(file, ignored)) file = fs::weakly_canonical(file, ignored);
    if (file.filename() != "config.toml" || options.given.contains("out-dir")) return options.out_dir;
    const fs::path folder = file.parent_path();
    const bool is_other = fs::is_regular_file(folder / "run.json", ignored) &&
                          !fs::equivalent(folder / "", options.out_dir, ignored);
    return !is_other ? options.out_dir : folder.empty() ? "." : folder.string();
}

// --resume DIR may name the directory of a run. It then means the checkpoint that --resume alone would find there.
void find_run(const Options& options, Sources& sources) {
    std::error_code ignored;
    if (!options.resume) return;
    sources.takes_newest = options.resume->empty();
    if (options.resume->empty()) sources.out_dir = run_of_config(options);
    if (!fs::is_directory(*options.resume, ignored)) return;
    Options alone = options;
    alone.resume = "";
    const std::optional<CheckpointInfo> newest = find_checkpoint(alone, *options.resume);
    if (!newest) {  // the directory is itself a checkpoint, or holds none
        if (!fs::is_regular_file(fs::path(*options.resume) / "run.json", ignored)) return;
        user_error(
            "--resume: the last run in {} saved no checkpoint; to begin it again, give --out-dir {} "
            "--overwrite instead",
            *options.resume, shell_word(*options.resume));
    }
    // `newest` may be in another directory, from which the last run here began.
    if (options.out_dir.empty())
        sources.out_dir = directory_of_run(fs::path(*options.resume) / "checkpoint").string();
    sources.resume = newest->directory.string();
    sources.takes_newest = true;
}

// The settings that the configuration of a checkpoint's run gave; none if there is no such file. A note if it
// cannot be read.
std::set<std::string, std::less<>> settings_of_run(const CheckpointInfo& checkpoint,
                                                   std::vector<std::string>& notes) {
    std::set<std::string, std::less<>> names;
    std::error_code ignored;
    const fs::path file = directory_of_run(checkpoint.directory) / "config.toml";
    if (fs::status(file, ignored).type() == fs::file_type::not_found) return names;
    try {
        for (const ConfigSetting& setting : read_config_file(file.string())) names.insert(setting.name);
    } catch (const UserError& fault) {
        notes.push_back(fmt::format(
            "{}; so it is not known whether the run was given --reduce-every, --init and --out-dir, and "
            "they are not kept: give them again",
            fault.what()));
    }
    return names;
}

ModelFolder read_folder(const std::string& name) {
    const fs::path folder = name;
    return {name, fs::absolute(folder).string(), read_file((folder / "config.json").string())};
}

// --init DIR may name a folder of a model, a checkpoint's directory, or that of a run, which stands for the checkpoint
// that --resume would find there.
void find_weights(const Options& options, Sources& sources) {
    std::error_code ignored;
    sources.weights = options.init;
    if (!fs::is_directory(options.init, ignored)) return;
    if (is_model_folder(options.init)) {
        sources.init_folder = read_folder(options.init);
        return;
    }
    if (is_sharded_folder(options.init)) return;
    const fs::path folder = options.init, weights = folder / "model.safetensors";
    if (!fs::exists(folder / "manifest.json", ignored) && !holds_run(folder)) {
        user_error(
            "{} has no manifest.json of a checkpoint, no run.json of a run, no config.json of a folder in "
            "Hugging Face's format, and no files of a distributed checkpoint of PyTorch; give one of these{}",
            options.init,
            fs::exists(weights, ignored) ? fmt::format(", or its weights alone: --init {}", weights.string())
                                         : "");
    }
    sources.init_checkpoint = newest_of_last_run(options.init);
    if (!sources.init_checkpoint) sources.init_checkpoint = read_checkpoint(options.init);
    sources.weights = sources.init_checkpoint->directory.string();
    if (sources.init_checkpoint->base)
        user_error(
            "{} has adapters, and not a model; go on with --resume {}, or export a model with --export DIR "
            "--merge",
            sources.weights, shell_word(sources.weights));
}

// The adapter of --lora, and the folder of its base.
void find_adapter(const Options& options, Sources& sources) {
    if (options.lora.empty()) return;
    sources.adapter = read_adapter(options.lora);
    sources.base = options.init;
    if (!sources.base.empty()) return;
    sources.base = sources.adapter->config.base;
    std::error_code ignored;
    if (sources.base.empty() || !fs::exists(sources.base, ignored))
        user_error("{} names {} as its base, which is not here; give the base with --init", options.lora,
                   sources.base.empty() ? "nothing" : in_quotes(sources.base));
}

// The weights beside which a checkpoint's adapters were trained: those of --init, or those that it names.
void find_base(const Options& options, Sources& sources) {
    const std::string& named = sources.checkpoint->base->weights;
    Options of_base = options;
    std::error_code ignored;
    // A run that has gone on has newer checkpoints than the one that it had then.
    const bool has_gone_on = fs::exists(named, ignored) && is_of_run(named, options.init);
    if (of_base.init.empty() || has_gone_on) of_base.init = named;
    if (!fs::exists(of_base.init, ignored)) {
        const std::string adapters =
            fmt::format("{} has adapters for", sources.checkpoint->directory.string());
        if (options.init.empty())
            user_error("{} {}, which is gone; give its new place with --init", adapters, named);
        user_error("--init: {} is not there; {} {}; give their place", options.init, adapters, named);
    }
    Sources found;
    naming_option("--init", [&] { find_weights(of_base, found); });
    sources.weights = found.weights;
    sources.base = of_base.init;
}

}  // namespace

Sources find_sources(const Options& options) {
    Sources sources;
    sources.out_dir = options.out_dir;
    sources.resume = options.resume;
    find_run(options, sources);
    if (options.resume) {
        Options of_run = options;
        of_run.out_dir = sources.out_dir;
        of_run.resume = sources.resume;
        const fs::path results = choose_out_dir(of_run);
        sources.results = results.string();
        sources.checkpoint = find_checkpoint(of_run, results);
        if (sources.checkpoint && !options.generate)
            sources.given_then = settings_of_run(*sources.checkpoint, sources.notes);
        if (!sources.checkpoint && options.generate)
            user_error(
                "--generate: there is no checkpoint in {}; give --resume the directory of a checkpoint",
                (of_run.out_dir.empty() ? results.parent_path() : results).string());
    }
    if (sources.checkpoint) {  // its model and weights
        if (sources.checkpoint->base) {
            find_base(options, sources);
        } else if (!options.lora.empty()) {
            const std::string given = sources.checkpoint->directory.string();
            user_error(
                "{} has no adapters; leave --lora out, or adapt its weights in a new run with --init {}",
                given, shell_word(given));
        }
        return sources;
    }
    naming_option("--lora", [&] { find_adapter(options, sources); });
    Options with_base = options;
    if (sources.adapter) with_base.init = sources.base;
    const bool is_named = sources.adapter && options.init.empty();
    naming_option(is_named ? fmt::format("the base that {} names", options.lora) : "--init",
                  [&] { find_weights(with_base, sources); });
    naming_option("--model", [&] {
        if (!is_known_model(options.model) && is_model_folder(options.model))
            sources.model_folder = read_folder(options.model);
    });
    return sources;
}

}  // namespace llmc
