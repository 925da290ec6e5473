#include "llmc/train/outputs.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <iterator>
#include <optional>
#include <system_error>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/io/checkpoint.h"
#include "llmc/io/files.h"
#include "llmc/io/metrics.h"
#include "llmc/train/algorithms.h"
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

// Whether the run itself uses this path: as its directory or a parent of it, run.json, config.toml, or a
// checkpoint.
bool is_own_place(const fs::path& file, const fs::path& out_dir) {
    const fs::path folder = plain_path(out_dir), path = plain_path(file);
    const auto [rest, rest_of_folder] = std::ranges::mismatch(path, folder);
    if (rest == path.end()) return true;
    if (rest_of_folder == folder.end() && is_checkpoint_name(rest->string())) return true;
    return path.parent_path().filename().string().starts_with("checkpoint-") ||
           same_file(file, out_dir / "run.json") || same_file(file, out_dir / "config.toml");
}

// Whether a directory holds a run's record or configuration.
bool holds_run(const fs::path& out_dir) {
    std::error_code ignored;
    return fs::is_regular_file(out_dir / "run.json", ignored) ||
           fs::is_regular_file(out_dir / "config.toml", ignored);
}

// The files that a run writes about itself.
std::vector<std::string> names_of_records() {
    std::vector<std::string> names = pipeline_files();
    for (const char* name : {"run.json", "config.toml", "metrics.jsonl", algorithms_file})
        names.push_back(name);
    return names;
}

// The parent directory of runs without --out-dir.
constexpr const char* all_runs = "runs";

// The run that was started or resumed last.
std::optional<fs::path> newest_run() {
    std::optional<fs::path> newest;
    fs::file_time_type newest_time{};
    std::error_code error;
    for (fs::directory_iterator entries(all_runs, error); !error && entries != fs::directory_iterator();
         entries.increment(error)) {
        std::error_code no_run;
        const fs::file_time_type time = fs::last_write_time(entries->path() / "run.json", no_run);
        if (no_run || (newest && time <= newest_time)) continue;
        newest = entries->path();
        newest_time = time;
    }
    return newest;
}

}  // namespace

fs::path metrics_file(const Options& options, const fs::path& out_dir) {
    return options.metrics.empty() ? out_dir / "metrics.jsonl" : fs::path(options.metrics);
}

fs::path run_with(const fs::path& checkpoints) {
    return checkpoints.filename() == best_folder ? checkpoints.parent_path() : checkpoints;
}

fs::path choose_out_dir(const Options& options) {
    if (!options.out_dir.empty()) return options.out_dir;
    if (options.resume && !options.resume->empty())
        return run_with(plain_path(*options.resume).parent_path());
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

Writes what_is_written(const Options& options, const fs::path& out_dir, bool trains, bool has_checkpoint) {
    if (trains) return {};
    const bool names_out_dir = !options.out_dir.empty();
    return {.checkpoints = false,
            .record = names_out_dir && !(has_checkpoint && holds_run(out_dir)),
            .metrics = (names_out_dir || !options.metrics.empty()) &&
                       !(has_checkpoint && holds_steps(metrics_file(options, out_dir)))};
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

void require_no_other_run(const Options& options, const fs::path& out_dir, const Writes& writes,
                          const CheckpointInfo* resumed) {
    // A new run without --out-dir gets a directory of its own (claim_directory).
    const bool is_own = options.out_dir.empty() && resumed == nullptr;
    if (options.overwrite || is_own || !(writes.checkpoints || writes.record)) return;
    if (resumed != nullptr && run_with(plain_path(resumed->directory).parent_path()) == plain_path(out_dir))
        return;
    std::optional<CheckpointInfo> newest;
    bool is_damaged = false;
    try {
        newest = newest_checkpoint(out_dir, std::nullopt);
    } catch (const UserError&) {
        is_damaged = true;
    }
    if (!newest && !is_damaged && !holds_run(out_dir)) return;
    if (resumed == nullptr) {
        // --resume-if-any begins a run again that had saved no checkpoint.
        if (options.resume_if_any) return;
    } else {
        const std::optional<RunRecord> last = read_last_run(out_dir);
        const bool is_same = newest && newest->lineage == resumed->lineage;
        if (is_same || (last && !last->began_from.empty() &&
                        plain_path(last->began_from) == plain_path(resumed->directory)))
            return;
    }
    const std::int64_t steps =
        std::max(last_step(out_dir / "metrics.jsonl"), newest ? newest->progress.step : 0);
    user_error(
        "--out-dir: {} holds a run of {}; {}choose another --out-dir, or add --overwrite to replace it",
        out_dir.string(), plural(steps, "step"), resumed == nullptr && newest ? "add --resume, " : "");
}

void remove_run(const fs::path& out_dir) {
    std::error_code ignored;
    for (const std::string& name : names_of_records()) fs::remove(out_dir / name, ignored);
    remove_checkpoints(out_dir / best_folder);
    remove_checkpoints(out_dir);
}

void check_outputs(const Options& options, const fs::path& out_dir, const Writes& writes,
                   std::span<const std::string> inputs, std::int64_t parameters) {
    const fs::path metrics = metrics_file(options, out_dir), exported = options.export_file;
    const bool metrics_given = !options.metrics.empty();
    const auto refuse_overwriting = [](const char* option, const fs::path& file, const fs::path& source) {
        if (!source.empty() && same_file(file, source)) {
            user_error("{}: {} would overwrite {}, which this run reads; give another name", option,
                       file.string(), source.string());
        }
    };
    const auto refuse_own_files = [&](const char* option, const fs::path& file) {
        if (is_own_place(file, out_dir) || (!metrics_given && same_file(file, metrics))) {
            user_error("{}: this run uses the name {} for other results (--out-dir {}); give another name",
                       option, file.string(), out_dir.string());
        }
    };

    if (writes.checkpoints || writes.record) {
        naming_option("--out-dir", [&] { require_writable_directory(out_dir); });
        std::vector<std::string> names = {"run.json", "config.toml"};
        if (options.pipeline_timeline) std::ranges::copy(pipeline_files(), std::back_inserter(names));
        for (const std::string& name : names)
            naming_option("--out-dir", [&] { require_writable_file(out_dir / name); });
    }
    if (writes.metrics) {
        const char* option = metrics_given ? "--metrics" : "--out-dir";
        naming_option(option, [&] { require_writable_file(metrics); });
        for (const std::string& input : inputs) refuse_overwriting(option, metrics, input);
        for (const std::string& input : {options.init, options.config_file})
            refuse_overwriting(option, metrics, input);
        if (metrics_given) refuse_own_files(option, metrics);
    }
    if (options.overwrite && !options.init.empty() && writes.checkpoints) {
        const fs::path source = plain_path(options.init);
        const bool is_removed = source.parent_path() == plain_path(out_dir) ||
                                source.parent_path() == plain_path(out_dir / best_folder);
        if (is_removed && fs::is_directory(source)) {
            user_error("--overwrite would remove {}, which this run starts from; choose another --out-dir",
                       options.init);
        }
    }
    const std::uint64_t checkpoint =
        writes.checkpoints ? (options.keep_best ? 2 : 1) * checkpoint_bytes(parameters) : 0;
    naming_option("--out-dir", [&] { require_space(out_dir, checkpoint); });
    if (!exported.empty()) {
        naming_option("--export", [&] { require_replaceable_file(exported); });
        refuse_own_files("--export", exported);
        // --export may replace the file of --init.
        for (const std::string& input : inputs) refuse_overwriting("--export", exported, input);
        refuse_overwriting("--export", exported, options.config_file);
        if (same_file(exported, metrics))
            user_error("--export and --metrics name the same file, {}; give two names", metrics.string());
        const std::uint64_t beside = on_one_disk(out_dir, exported) ? checkpoint : 0;
        naming_option("--export", [&] { require_space(exported, weights_bytes(parameters), beside); });
    }
}

}  // namespace llmc
