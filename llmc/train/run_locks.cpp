#include "llmc/train/run_locks.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <optional>
#include <string_view>
#include <system_error>
#include <thread>

#include "llmc/core/error.h"
#include "llmc/io/files.h"
#include "llmc/io/metrics.h"
#include "llmc/train/outputs.h"
#include "llmc/train/resume.h"
#include "llmc/train/stop.h"

namespace llmc {

namespace {

using Output = RunLocks::Output;
namespace fs = std::filesystem;
using std::chrono::steady_clock;

constexpr std::chrono::minutes patience{2};
constexpr std::chrono::milliseconds pause{50};

constexpr std::string_view of_folder = "--out-dir";

std::vector<Output> outputs_of(const Options& options, const fs::path& out_dir, const Writes& writes) {
    std::vector<Output> all;
    if (writes.into_folder(options)) all.push_back({of_folder, out_dir, out_dir / lock_file});
    if (!writes.metrics) return all;
    const fs::path metrics = metrics_file(options, out_dir);
    if (const std::optional<fs::path> file = replaced_metrics(metrics))
        all.push_back({options.metrics.empty() ? of_folder : std::string_view("--metrics"), metrics,
                       fs::path(*file) += ".lock"});
    return all;
}

// A new run without --out-dir gets a directory of its own (claim_directory).
bool gets_own_folder(const Options& options) { return options.out_dir.empty() && !options.resume; }

bool is_in_folder(const Output& output) { return output.option == of_folder; }

bool use_folder(const std::vector<Output>& outputs) { return std::ranges::any_of(outputs, is_in_folder); }

// As far as the options tell, before the model and the data are known.
std::vector<Output> outputs_of(const Options& options) {
    if (options.generate) return {};
    const fs::path out_dir = choose_out_dir(options);
    const std::optional<CheckpointInfo> checkpoint = find_checkpoint(options, out_dir);
    const bool trains = has_steps_to_train(options, checkpoint);
    std::vector<Output> all =
        outputs_of(options, out_dir, what_is_written(options, out_dir, trains, checkpoint.has_value()));
    if (gets_own_folder(options)) std::erase_if(all, is_in_folder);
    return all;
}

struct HeldOutput {
    Output output;
    std::string holder;
};

std::optional<HeldOutput> first_held(const std::vector<Output>& all) {
    for (const Output& output : all)
        if (const auto holder = lock_holder(output.lock)) return HeldOutput{output, *holder};
    return std::nullopt;
}

std::string_view remedy_of(const Options& options) {
    return options.resume ? "wait until it ends, as --resume-if-any does" : "wait until it ends";
}

[[noreturn]] void refuse(const HeldOutput& held, std::string_view remedy) {
    user_error("{}: {} is in use by {}; {}, or choose another {}", held.output.option,
               held.output.path.string(), held.holder, remedy, held.output.option);
}

}  // namespace

std::string record_in(const fs::path& out_dir) {
    std::error_code ignored;
    const fs::path file = out_dir / "run.json";
    return fs::is_regular_file(file, ignored) ? read_file(file) : "";
}

std::string wait_for_other_starts(Session& session) {
    const bool waits = session.options().resume_if_any;
    const auto end = steady_clock::now() + patience;
    const std::vector<Output> all =
        session.is_rank_zero() ? outputs_of(session.options()) : std::vector<Output>();
    for (bool is_first = true;; is_first = false) {
        const std::optional<HeldOutput> held = first_held(all);
        if (held && !waits) refuse(*held, remedy_of(session.options()));
        if (held && steady_clock::now() >= end)
            refuse(*held, fmt::format("it did not end within {} minutes: stop it", patience.count()));
        if (!on_any_rank(session.world(), held.has_value())) break;
        if (held && is_first)
            session.console().note(
                fmt::format("{} is in use by {}: waiting until it ends, for {} minutes at most",
                            held->output.path.string(), held->holder, patience.count()));
        if (session.ask_to_stop()) return "";
        std::this_thread::sleep_for(pause);
    }
    std::string record = use_folder(all) ? record_in(choose_out_dir(session.options())) : "";
    if (session.options().resume) session.read_options_again();
    return record;
}

RunLocks::~RunLocks() { release(); }

void RunLocks::release() {
    // The last one may lie in a folder that the first one has made and removes.
    while (!locks_.empty()) locks_.pop_back();
}

bool RunLocks::lock_named(const PreparedRun& run) {
    const Options& options = run.options;
    if (run.comes_late) return false;
    if (options.generate || !run.has_work()) return true;
    bool comes_late = false;
    if (run.is_rank_zero()) {
        std::vector<Output> outputs = outputs_of(options, run.out_dir, run.writes);
        if (gets_own_folder(options)) std::erase_if(outputs, is_in_folder);
        comes_late = !lock(run, outputs);
        if (!comes_late && use_folder(outputs) && record_in(run.out_dir) != run.earlier_record) {
            if (!options.resume_if_any)
                user_error(
                    "--out-dir: another start of the program has begun in {} meanwhile; start this one again",
                    run.out_dir.string());
            comes_late = true;
        }
    }
    if (!on_any_rank(run.session.world(), comes_late)) return true;
    release();
    return false;
}

void RunLocks::lock_own_folder(const PreparedRun& run) {
    if (!run.is_rank_zero() || !gets_own_folder(run.options)) return;
    std::vector<Output> outputs = outputs_of(run.options, run.out_dir, run.writes);
    std::erase_if(outputs, [](const Output& output) { return !is_in_folder(output); });
    lock(run, outputs);
}

bool RunLocks::lock(const PreparedRun& run, const std::vector<Output>& outputs) {
    for (const Output& output : outputs) {
        const FileLock& lock = locks_.emplace_back(output.lock);
        if (lock.holder() && run.options.resume_if_any) return false;
        if (lock.holder()) refuse({output, *lock.holder()}, remedy_of(run.options));
        if (!lock.fault().empty())
            run.session.console().note(fmt::format(
                "{} cannot be locked ({}): let no other start of the program write there meanwhile",
                output.path.string(), lock.fault()));
    }
    return true;
}

}  // namespace llmc
