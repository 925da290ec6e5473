#include "llmc/train/outputs.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <system_error>

#include "llmc/core/error.h"
#include "llmc/io/checkpoint.h"
#include "llmc/io/files.h"

namespace llmc {

namespace {

namespace fs = std::filesystem;

// The same file, whether it is there already or not.
bool same_file(const fs::path& a, const fs::path& b) {
    std::error_code ignored;
    if (fs::equivalent(a, b, ignored)) return true;
    return fs::weakly_canonical(a, ignored) == fs::weakly_canonical(b, ignored);
}

}  // namespace

fs::path metrics_file(const Options& options, const fs::path& out_dir) {
    return options.metrics.empty() ? out_dir / "metrics.jsonl" : fs::path(options.metrics);
}

fs::path choose_out_dir(const Options& options) {
    if (!options.out_dir.empty()) return options.out_dir;
    if (options.resume && !options.resume->empty()) return plain_path(*options.resume).parent_path();
    return fs::path("runs") / fmt::format("{:%Y-%m-%d_%H-%M-%S}", fmt::localtime(std::time(nullptr)));
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

bool holds_run(const fs::path& out_dir) {
    std::error_code ignored;
    return fs::exists(out_dir / "run.json", ignored) || fs::exists(out_dir / "config.toml", ignored);
}

void check_outputs(const Options& options, const fs::path& out_dir, std::span<const std::string> inputs,
                   std::int64_t parameters) {
    const fs::path metrics = metrics_file(options, out_dir), exported = options.export_file;
    const char* metrics_option = options.metrics.empty() ? "--out-dir" : "--metrics";
    const auto refuse_overwriting = [](const char* option, const fs::path& file, const fs::path& source) {
        if (same_file(file, source)) {
            user_error("{}: {} would overwrite {}, which this run reads; give another name", option,
                       file.string(), source.string());
        }
    };

    naming_option("--out-dir", [&] { require_writable_directory(out_dir); });
    naming_option(metrics_option, [&] { require_writable_file(metrics); });
    for (const char* name : {"run.json", "config.toml"})
        naming_option("--out-dir", [&] { require_writable_file(out_dir / name); });
    for (const std::string& input : inputs) refuse_overwriting(metrics_option, metrics, input);
    for (const std::string& input : {options.init, options.config_file})
        if (!input.empty()) refuse_overwriting(metrics_option, metrics, input);
    const auto refuse_own_files = [&](const char* option, const fs::path& file) {
        const fs::path folder = plain_path(out_dir), path = plain_path(file);
        const auto [rest, below] = std::ranges::mismatch(path, folder);
        const bool above = rest == path.end();
        const bool a_checkpoint =
            below == folder.end() && rest != path.end() && is_checkpoint_name(rest->string());
        const bool in_checkpoint = path.parent_path().filename().string().starts_with("checkpoint-");
        if (above || a_checkpoint || in_checkpoint || same_file(file, out_dir / "run.json") ||
            same_file(file, out_dir / "config.toml") ||
            (options.metrics.empty() && option != metrics_option && same_file(file, metrics))) {
            user_error("{}: {} is where this run keeps other results (--out-dir {}); give another name",
                       option, file.string(), out_dir.string());
        }
    };
    if (!options.metrics.empty()) refuse_own_files("--metrics", metrics);
    if (!exported.empty()) {
        naming_option("--export", [&] { require_replaceable_file(exported); });
        refuse_own_files("--export", exported);
        // --init may be replaced by what became of it.
        for (const std::string& input : inputs) refuse_overwriting("--export", exported, input);
        if (!options.config_file.empty()) refuse_overwriting("--export", exported, options.config_file);
        if (same_file(exported, metrics))
            user_error("--export and --metrics are the same file, {}", metrics.string());
    }
    const std::uint64_t checkpoint = options.steps > 0 ? checkpoint_bytes(parameters) : 0;
    naming_option("--out-dir", [&] { require_space(out_dir, checkpoint); });
    if (!exported.empty()) {
        const std::uint64_t beside = on_one_disk(out_dir, exported) ? checkpoint : 0;
        naming_option("--export", [&] { require_space(exported, weights_bytes(parameters), beside); });
    }
}

}  // namespace llmc
