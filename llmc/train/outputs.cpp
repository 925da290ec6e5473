#include "llmc/train/outputs.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <iterator>
#include <optional>
#include <system_error>
#include <vector>

#include "llmc/comm/texts_of_ranks.h"
#include "llmc/comm/values_of_ranks.h"
#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/io/checkpoint.h"
#include "llmc/io/export_folder.h"
#include "llmc/io/files.h"
#include "llmc/io/metrics.h"
#include "llmc/io/stored_tensors.h"
#include "llmc/train/algorithms.h"
#include "llmc/train/config_file.h"
#include "llmc/train/folder_options.h"
#include "llmc/train/pipeline_report.h"

namespace llmc {

namespace {

namespace fs = std::filesystem;

// Whether both names mean the same file, which need not exist yet.
bool same_file(const fs::path& a, const fs::path& b) {
    std::error_code ignored;
    if (fs::equivalent(a, b, ignored)) return true;
    return fs::weakly_canonical(a, ignored) == fs::weakly_canonical(b, ignored);
}

constexpr const char* metrics_name = "metrics.jsonl";

// The files that a run writes about itself.
std::vector<std::string> names_of_records() {
    std::vector<std::string> names = pipeline_files();
    for (const char* name : {"run.json", "config.toml", metrics_name, algorithms_file})
        names.emplace_back(name);
    return names;
}

// Whether a run uses this path: this run, as its directory or a parent of it, or any run, as one of its records
// or a checkpoint. Links count as what they lead to.
// The metrics of a run are such a record, but metrics may take their place: they are kept (metrics.h).
bool is_place_of_run(const fs::path& file, const fs::path& out_dir, bool are_metrics) {
    std::error_code ignored;
    const fs::path folder = fs::weakly_canonical(plain_path(out_dir), ignored),
                   path = fs::weakly_canonical(plain_path(file), ignored);
    if (path.empty()) return false;  // a link to itself, which other checks name
    const auto [rest, rest_of_folder] = std::ranges::mismatch(path, folder);
    if (rest == path.end()) return true;
    if (rest_of_folder == folder.end() &&
        (is_checkpoint_name(rest->string()) || path == folder / best_folder))
        return true;
    if (path.parent_path().filename().string().starts_with("checkpoint-")) return true;
    std::vector<std::string> records = names_of_records();
    records.emplace_back(lock_file);
    if (std::ranges::find(records, path.filename().string()) == records.end()) return false;
    if (are_metrics && path.filename() == metrics_name) return false;
    return same_file(path.parent_path(), out_dir) || holds_run(path.parent_path());
}

// Whether the last run here was started with --steps 0: it had nothing to train.
bool only_evaluated(const fs::path& out_dir) {
    try {
        const std::vector<ConfigSetting> settings = read_config_file((out_dir / "config.toml").string());
        return std::ranges::any_of(settings, [](const ConfigSetting& setting) {
            return setting.name == "steps" && setting.value == "0";
        });
    } catch (const UserError&) {
        return false;
    }
}

// The parent directory of runs without --out-dir.
constexpr const char* all_runs = "runs";

// The run that was started or resumed last, except evaluations.
std::optional<fs::path> newest_run() {
    std::optional<fs::path> newest;
    fs::file_time_type newest_time{};
    std::error_code error;
    for (fs::directory_iterator entries(all_runs, error); !error && entries != fs::directory_iterator();
         entries.increment(error)) {
        std::error_code no_run;
        const fs::file_time_type time = fs::last_write_time(entries->path() / "run.json", no_run);
        if (no_run || (newest && time <= newest_time) || only_evaluated(entries->path())) continue;
        newest = entries->path();
        newest_time = time;
    }
    return newest;
}

}  // namespace

fs::path metrics_file(const Options& options, const fs::path& out_dir) {
    return options.metrics.empty() ? out_dir / metrics_name : fs::path(options.metrics);
}

fs::path directory_of_run(const fs::path& checkpoint) {
    const auto is_best = [](const fs::path& folder) {
        return folder.filename() == best_folder && !holds_run(folder) && holds_run(folder.parent_path());
    };
    const fs::path folder = plain_path(checkpoint).parent_path();
    std::error_code ignored;
    const fs::path real = fs::weakly_canonical(folder, ignored);  // a link may lead to the folder `best`
    const fs::path run = is_best(folder) ? folder.parent_path() : is_best(real) ? real.parent_path() : folder;
    return checkpoint.is_absolute() ? run : run.lexically_relative(fs::current_path());
}

bool is_of_run(const fs::path& checkpoint, const fs::path& out_dir) {
    return same_file(directory_of_run(checkpoint), out_dir);
}

std::optional<CheckpointInfo> best_checkpoint(const fs::path& out_dir) {
    std::error_code ignored;
    if (holds_run(out_dir / best_folder)) return std::nullopt;
    for (const CheckpointInfo& kept : readable_checkpoints(out_dir / best_folder))
        if (has_weights(kept.directory)) return kept;
    return std::nullopt;
}

std::optional<CheckpointInfo> newest_of_run(const fs::path& out_dir, const std::optional<std::string>& run,
                                            const Damages& damages) {
    std::optional<CheckpointInfo> newest = newest_checkpoint(out_dir, run, damages), best;
    try {
        if (!holds_run(out_dir / best_folder)) best = newest_checkpoint(out_dir / best_folder, run, damages);
    } catch (const UserError&) {
        if (!newest) throw;
    }
    if (!newest || !best) return newest ? newest : best;
    std::vector<CheckpointInfo> both = {*newest, *best};  // if they are of one step, their order stays
    sort_newest_first(both);
    return both.front();
}

fs::path choose_out_dir(const Options& options) {
    if (!options.out_dir.empty()) return options.out_dir;
    if (options.resume && !options.resume->empty()) return directory_of_run(*options.resume);
    if (options.resume) {
        if (const auto newest = newest_run()) return *newest;
    }
    return fs::path(all_runs) / fmt::format("{:%Y-%m-%d_%H-%M-%S}", fmt::localtime(std::time(nullptr)));
}

fs::path claim_directory(const fs::path& name) {
    make_directory(name.parent_path());
    for (int number = 1;; ++number) {
        fs::path candidate = number == 1 ? name : fs::path(fmt::format("{}-{}", name.string(), number));
        std::error_code error;
        if (fs::create_directory(candidate, error)) return candidate;
        if (error) user_error("cannot create {}: {}", candidate.string(), error.message());
    }
}

bool has_steps_to_train(const Options& options, const std::optional<CheckpointInfo>& checkpoint) {
    return options.steps > 0 && !(checkpoint && checkpoint->progress.step >= options.steps);
}

Writes what_is_written(const Options& options, const fs::path& out_dir, bool trains, bool has_checkpoint) {
    if (trains) return {};
    // A checkpoint that is resumed also sets out_dir, but nobody named that place now.
    const bool names_out_dir = options.given.contains("out-dir") || options.lines.contains("out-dir");
    const bool names_file = !options.metrics.empty();
    // Without given weights it is only a plan, which leaves no record, and nothing in the directory of a run.
    const bool evaluates = has_checkpoint || !options.init.empty();
    const bool is_free = !holds_run(out_dir);
    return {.checkpoints = false,
            .record = names_out_dir && evaluates && (is_free || !has_checkpoint),
            .metrics = (names_file || (names_out_dir && (evaluates || is_free))) &&
                       !(has_checkpoint && holds_steps(metrics_file(options, out_dir)))};
}

bool holds_run(const fs::path& out_dir) {
    std::error_code ignored;
    return fs::is_regular_file(out_dir / "run.json", ignored) ||
           fs::is_regular_file(out_dir / "config.toml", ignored);
}

bool holds_records(const Options& options, const fs::path& out_dir) {
    return holds_run(out_dir) || holds_steps(metrics_file(options, out_dir));
}

std::string records_stay(const Options& options, const fs::path& out_dir, const Writes& writes) {
    std::string text = "nothing to train: the earlier run's records are not changed";
    // The earlier run may still be training and writing to that file.
    if (!writes.metrics) {
        text += fmt::format(", and results are not added to {}; to record them, give --metrics a new file",
                            metrics_file(options, out_dir).string());
    }
    return text;
}

void require_no_checkpoint(const fs::path& out_dir) {
    std::error_code ignored;
    if (is_checkpoint_name(plain_path(out_dir).filename().string()) && has_weights(out_dir)) {
        user_error("--out-dir: {} is a checkpoint; name the directory of a run, or one that does not exist",
                   out_dir.string());
    }
    const bool is_best = plain_path(out_dir).filename() == best_folder && !holds_run(out_dir);
    if (is_best && holds_run(plain_path(out_dir).parent_path())) {
        user_error("--out-dir: {} is for the best checkpoint of the run above it; choose another --out-dir",
                   out_dir.string());
    }
}

void require_no_other_run(const Options& options, const fs::path& out_dir, const Writes& writes,
                          const CheckpointInfo* resumed) {
    // A new run without --out-dir gets a directory of its own (claim_directory).
    const bool is_own = options.out_dir.empty() && resumed == nullptr;
    if (is_own || !writes.into_folder(options)) return;
    require_no_checkpoint(out_dir);
    if (options.overwrite) return;
    if (resumed != nullptr && is_of_run(resumed->directory, out_dir)) return;
    std::optional<CheckpointInfo> newest;
    bool is_damaged = false;
    try {
        newest = newest_of_run(out_dir, std::nullopt);
    } catch (const UserError&) {
        is_damaged = true;
    }
    const std::int64_t steps =
        std::max(last_step(out_dir / metrics_name), newest ? newest->progress.step : 0);
    if (!newest && !is_damaged && !holds_run(out_dir)) return;
    if (resumed == nullptr) {
        // --resume-if-any begins a run again that had saved no checkpoint.
        if (options.resume_if_any && options.steps > 0) return;
    } else {
        // A run of `out_dir` that began from the same run goes on there.
        const std::optional<RunRecord> last = read_last_run(out_dir);
        if (last && !last->branched_from.empty() &&
            is_of_run(resumed->directory, directory_of_run(last->branched_from)))
            return;
    }
    const std::string_view remedy =
        resumed != nullptr   ? "choose another --out-dir"
        : options.steps == 0 ? "choose another --out-dir, or leave it out"
        : newest             ? "add --resume, choose another --out-dir, or add --overwrite to replace it"
                             : "choose another --out-dir, or add --overwrite to replace it";
    user_error("--out-dir: {} holds {} of {}; {}", out_dir.string(),
               resumed != nullptr ? "another run" : "a run", plural(steps, "step"), remedy);
}

ReplacedRun::ReplacedRun(const fs::path& out_dir) : out_dir_(out_dir) {
    try {
        for (const std::string& name : names_of_records()) set_aside(name);
        for (const fs::path& folder : {fs::path(), fs::path(best_folder)}) {
            std::error_code ignored;
            std::vector<fs::path> found;
            const bool is_others = fs::is_symlink(out_dir / folder, ignored) || holds_run(out_dir / folder);
            if (!folder.empty() && is_others) continue;  // not made by this run
            for (const fs::directory_entry& entry : fs::directory_iterator(out_dir / folder, ignored))
                if (is_checkpoint_name(entry.path().filename().string()) &&
                    fs::is_directory(entry.symlink_status(ignored)))
                    found.push_back(folder / entry.path().filename());
            for (const fs::path& name : found) set_aside(name);
        }
    } catch (...) {
        put_back();
        throw;
    }
}

ReplacedRun::~ReplacedRun() { put_back(); }

void ReplacedRun::set_aside(const fs::path& name) {
    std::error_code error;
    if (!fs::exists(fs::symlink_status(out_dir_ / name, error))) return;
    if (aside_.empty()) {
        // A folder of its own: an earlier start that was killed may have left one, and the run that is in it.
        std::string pattern = (out_dir_ / "replaced-run-XXXXXX").string();
        if (mkdtemp(pattern.data()) == nullptr)
            user_error("--overwrite: cannot write to {}: {}", out_dir_.string(), std::strerror(errno));
        aside_ = pattern;
    }
    fs::create_directories((aside_ / name).parent_path(), error);
    if (!error) fs::rename(out_dir_ / name, aside_ / name, error);
    if (error) user_error("--overwrite: cannot replace {}: {}", (out_dir_ / name).string(), error.message());
    names_.push_back(name);
}

void ReplacedRun::put_back() {
    std::error_code ignored;
    for (const fs::path& name : names_) {
        fs::remove_all(out_dir_ / name, ignored);  // the new run could not begin
        fs::rename(aside_ / name, out_dir_ / name, ignored);
    }
    names_.clear();
    remove_empty_folders();
}

void ReplacedRun::remove() {
    std::error_code ignored;
    for (const fs::path& name : names_) fs::remove_all(aside_ / name, ignored);
    names_.clear();
    remove_empty_folders();
    const fs::path best = out_dir_ / best_folder;
    if (fs::is_directory(fs::symlink_status(best, ignored)))
        fs::remove(best, ignored);  // only if it is empty
}

void ReplacedRun::remove_empty_folders() {
    std::error_code ignored;
    if (aside_.empty()) return;
    fs::remove(aside_ / best_folder, ignored);
    fs::remove(aside_, ignored);
}

namespace {

std::uint64_t bytes_of_checkpoints(const Options& options, const Writes& writes, const SavedBytes& bytes) {
    return writes.checkpoints ? (options.keep_best ? 2 : 1) * bytes.checkpoint : 0;
}

}  // namespace

void require_shared_directory(Communicator& world, const fs::path& out_dir) {
    if (world.size() == 1) return;
    std::optional<FolderToken> token;
    const fs::path place = text_of_root(world, [&] {
        token.emplace(out_dir);
        return token->place().string();
    });
    std::error_code ignored;
    const bool sees = fs::exists((plain_path(out_dir) / place).lexically_normal(), ignored);
    const std::vector<std::int32_t> see = values_of_ranks(world, std::int32_t{sees});
    token.reset();
    world.barrier();  // the first process that ends stops the others: the token must be gone before
    const auto blind = std::ranges::find(see, 0);
    if (blind != see.end())
        user_error(
            "--out-dir: rank {} does not see the folder {} of rank 0, where all processes save checkpoints; "
            "give a folder that all machines share",
            blind - see.begin(), out_dir.string());
}

void require_room_for_checkpoints(const Options& options, const std::filesystem::path& out_dir,
                                  const Writes& writes, const SavedBytes& bytes) {
    naming_option("--out-dir", [&] { require_space(out_dir, bytes_of_checkpoints(options, writes, bytes)); });
}

void check_outputs(const Options& options, const fs::path& out_dir, const Writes& writes,
                   std::span<const std::string> inputs, const SavedBytes& bytes) {
    const fs::path metrics = metrics_file(options, out_dir), exported = link_target(options.export_file);
    const bool metrics_given = !options.metrics.empty();
    const auto refuse_overwriting = [](const char* option, const fs::path& file, const fs::path& source) {
        if (!source.empty() && same_file(file, source)) {
            user_error("{}: {} would overwrite {}, which this run reads; give another name", option,
                       file.string(), source.string());
        }
    };
    const auto refuse_places_of_runs = [&](const char* option, const fs::path& file) {
        if (is_place_of_run(file, out_dir, option == std::string_view("--metrics")))
            user_error("{}: {} is for other results of a run; give another name", option, file.string());
    };

    if (writes.checkpoints || writes.record) {
        if (options.has_adapters() && same_file(out_dir, options.init))
            user_error(
                "--out-dir: {} is the base of the adapters, which the run's files would hide; give another",
                out_dir.string());
        naming_option("--out-dir", [&] { require_writable_directory(out_dir); });
        std::vector<std::string> names = {"run.json", "config.toml"};
        if (options.pipeline_timeline) std::ranges::copy(pipeline_files(), std::back_inserter(names));
        for (const std::string& name : names)
            naming_option("--out-dir", [&] { require_writable_file(out_dir / name); });
        if (options.keep_best) {
            const fs::path best = out_dir / best_folder;
            if (holds_run(best))
                user_error("--keep-best: {} holds a run of its own; choose another --out-dir", best.string());
            naming_option("--out-dir", [&] { require_writable_directory(best); });
        }
    }
    if (writes.metrics) {
        const char* option = metrics_given ? "--metrics" : "--out-dir";
        naming_option(option, [&] { require_writable_file(metrics); });
        for (const std::string& input : inputs) refuse_overwriting(option, metrics, input);
        for (const std::string& input : {options.weights, options.config_file})
            refuse_overwriting(option, metrics, input);
        if (metrics_given) refuse_places_of_runs(option, metrics);
    }
    if (options.overwrite && !options.init.empty() && writes.checkpoints) {
        // A checkpoint, or the weights in one.
        const fs::path given = fs::weakly_canonical(plain_path(options.weights)),
                       source = fs::is_directory(given) ? given : given.parent_path();
        const bool is_removed =
            is_checkpoint_name(source.filename().string()) &&
            (same_file(source.parent_path(), out_dir) ||
             (same_file(source.parent_path(), out_dir / best_folder) && !holds_run(out_dir / best_folder)));
        if (is_removed) {
            user_error("--overwrite would remove {}, which this run starts from; choose another --out-dir",
                       options.weights);
        }
    }
    const std::uint64_t checkpoint = bytes_of_checkpoints(options, writes, bytes);
    require_room_for_checkpoints(options, out_dir, writes, bytes);
    if (!exported.empty()) {
        refuse_places_of_runs("--export", exported);
        // --export may replace the file of --init, but checkpoints of adapters need their base.
        for (const std::string& input : inputs) refuse_overwriting("--export", exported, input);
        if (options.has_adapters() && !options.weights.empty()) {
            const StoredTensors base = find_weights(options.weights);
            for (const StoredFile& file : base.files()) refuse_overwriting("--export", exported, file.path);
        }
        refuse_overwriting("--export", exported, options.config_file);
        if (same_file(exported, metrics))
            user_error("--export and --metrics name the same file, {}; give two names", metrics.string());
        // The name that is given decides, and not that of a link's target.
        const bool is_folder = is_folder_name(options.export_file);
        naming_option("--export", [&] {
            if (is_folder) {
                require_new_folder(options.export_file);
            } else {
                require_replaceable_file(exported);
            }
        });
        if (is_folder) static_cast<void>(exported_config(options));  // or refuses
        const std::uint64_t beside = on_one_disk(out_dir, exported) ? checkpoint : 0;
        naming_option("--export", [&] {
            const bool are_adapters = options.has_adapters() && options.merge.empty();
            require_space(exported, are_adapters ? bytes.adapters : bytes.weights, beside);
        });
    }
}

}  // namespace llmc
