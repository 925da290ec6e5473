#include "llmc/train/sources.h"

#include <fmt/format.h>

#include <system_error>

#include "llmc/core/error.h"
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
    if (sources.checkpoint) return sources;  // its model and weights
    naming_option("--init", [&] { find_weights(options, sources); });
    naming_option("--model", [&] {
        if (!is_known_model(options.model) && is_model_folder(options.model))
            sources.model_folder = read_folder(options.model);
    });
    return sources;
}

}  // namespace llmc
