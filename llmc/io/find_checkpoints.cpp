// The names of checkpoints, those of a directory, and the record of its last run.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <ranges>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/io/checkpoint.h"
#include "llmc/io/files.h"

namespace llmc {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view name_prefix = "checkpoint-";

// The step in a checkpoint's name. Empty if save_checkpoint gives no such name, as for checkpoint-99. One that is being
// replaced counts: the new one may not have its name yet.
std::optional<std::int64_t> step_of_name(std::string name) {
    if (!name.starts_with(name_prefix)) return std::nullopt;
    if (name.ends_with(replaced_suffix)) name.resize(name.size() - replaced_suffix.size());
    const char* const end = name.data() + name.size();
    std::int64_t step = 0;
    const auto read = std::from_chars(name.data() + name_prefix.size(), end, step);
    if (read.ec != std::errc() || read.ptr != end || name != checkpoint_name(step)) return std::nullopt;
    return step;
}

fs::path record_file(const fs::path& out_dir) { return out_dir / "run.json"; }

}  // namespace

std::string checkpoint_name(std::int64_t step) { return fmt::format("{}{:08}", name_prefix, step); }

bool is_checkpoint_name(std::string_view name) {
    if (name.ends_with(partial_suffix)) name.remove_suffix(partial_suffix.size());
    return step_of_name(std::string(name)).has_value();
}

void sort_newest_first(std::vector<CheckpointInfo>& checkpoints) {
    std::ranges::stable_sort(checkpoints, std::ranges::greater(),
                             [](const CheckpointInfo& checkpoint) { return checkpoint.progress.step; });
    std::map<std::string, std::int64_t> ends;  // by run: the time of its last step, which comes first
    for (const CheckpointInfo& checkpoint : checkpoints) ends.emplace(checkpoint.run, checkpoint.saved_at);
    std::ranges::stable_sort(checkpoints, std::ranges::greater(), [&](const CheckpointInfo& checkpoint) {
        return std::pair(ends.at(checkpoint.run), checkpoint.run);
    });
}

namespace {

struct FoundCheckpoints {
    std::vector<CheckpointInfo> readable;
    std::map<std::int64_t, std::string> damaged;  // errors by step
};

FoundCheckpoints find_checkpoints(const fs::path& out_dir, const Damages& damages) {
    FoundCheckpoints found;
    std::error_code error, ignored;
    if (!fs::is_directory(out_dir, error)) return found;
    for (fs::directory_iterator entries(out_dir, error); !error && entries != fs::directory_iterator();
         entries.increment(error)) {
        const fs::path& path = entries->path();
        const auto step = step_of_name(path.filename().string());
        if (!step || !entries->is_directory(ignored)) continue;
        if (const auto damage = damages.find(plain_path(path).string()); damage != damages.end()) {
            found.damaged.emplace(*step, damage->second);
            continue;
        }
        try {
            found.readable.push_back(read_checkpoint(path));
        } catch (const UserError& fault) {
            found.damaged.emplace(*step, fault.what());
        }
    }
    if (error) user_error("cannot read {}: {}", out_dir.string(), error.message());
    // One that is being replaced comes after the one that has its name.
    std::ranges::sort(found.readable, {}, &CheckpointInfo::directory);
    sort_newest_first(found.readable);
    return found;
}

}  // namespace

std::optional<CheckpointInfo> newest_checkpoint(const fs::path& out_dir,
                                                const std::optional<std::string>& run,
                                                const Damages& damages) {
    FoundCheckpoints found = find_checkpoints(out_dir, damages);
    // A run with --keep-last may have removed the only one after saving another.
    const auto is_gone = [&](std::int64_t step) {
        const fs::path path = out_dir / checkpoint_name(step);
        std::error_code ignored;
        return !fs::exists(path, ignored) &&
               !fs::exists(path.string() + std::string(replaced_suffix), ignored);
    };
    while (found.readable.empty() && !found.damaged.empty() && is_gone(found.damaged.rbegin()->first))
        found = find_checkpoints(out_dir, damages);
    if (found.readable.empty() && !found.damaged.empty()) throw UserError(found.damaged.rbegin()->second);
    std::erase_if(found.readable,
                  [&](const CheckpointInfo& checkpoint) { return run && checkpoint.run != *run; });
    return found.readable.empty() ? std::nullopt : std::optional(std::move(found.readable.front()));
}

std::string damage_after(const fs::path& out_dir, std::int64_t step, const Damages& damages) {
    const FoundCheckpoints found = find_checkpoints(out_dir, damages);
    return found.damaged.empty() || found.damaged.rbegin()->first <= step ? ""
                                                                          : found.damaged.rbegin()->second;
}

std::string damage_of(const fs::path& directory) {
    try {
        verify_checkpoint(directory);
        return "";
    } catch (const UserError& fault) {
        const std::string damage = fault.what();
        return damage.starts_with(damage_prefix) ? damage : std::string(damage_prefix) + damage;
    }
}

std::vector<CheckpointInfo> readable_checkpoints(const fs::path& out_dir) {
    try {
        return find_checkpoints(out_dir, {}).readable;
    } catch (const UserError&) {
        return {};  // the folder cannot be read
    }
}

std::optional<CheckpointInfo> newest_whole(const std::vector<CheckpointInfo>& checkpoints) {
    for (const CheckpointInfo& checkpoint : checkpoints)
        if (damage_of(checkpoint.directory).empty()) return checkpoint;
    return std::nullopt;
}

// If the power fails meanwhile, the rest is no checkpoint.
void remove_checkpoint(const fs::path& path) {
    fs::path partial = path;
    if (!path.string().ends_with(partial_suffix)) partial += partial_suffix;
    std::error_code ignored;
    fs::rename(path, partial, ignored);
    fs::remove_all(partial, ignored);
}

namespace {

template <class F>
void remove_those(const fs::path& directory, const F& is_removed) {
    std::error_code error;
    std::vector<fs::path> old;
    for (fs::directory_iterator entries(directory, error); !error && entries != fs::directory_iterator();
         entries.increment(error)) {
        if (is_checkpoint_name(entries->path().filename().string()) && is_removed(entries->path()))
            old.push_back(entries->path());
    }
    std::ranges::for_each(old, remove_checkpoint);
}

}  // namespace

void remove_checkpoints(const fs::path& directory, const fs::path& kept) {
    remove_those(directory, [&](const fs::path& path) { return path != kept; });
}

std::vector<fs::path> checkpoints_up_to(const fs::path& directory, std::optional<CheckpointLink> last) {
    const std::vector<CheckpointInfo> all = readable_checkpoints(directory);
    std::vector<fs::path> found;
    while (last) {
        const auto next = std::ranges::find_if(all, [&](const CheckpointInfo& checkpoint) {
            return CheckpointLink{checkpoint.run, checkpoint.progress.step} == *last;
        });
        if (next == all.end()) break;
        found.push_back(next->directory);
        // A damaged folder must not lead in a circle.
        last = next->previous && next->previous->step < last->step ? next->previous : std::nullopt;
    }
    std::ranges::reverse(found);
    return found;
}

void remove_partial_checkpoints(const fs::path& directory) {
    remove_those(directory, [](const fs::path& path) {
        const std::string name = path.string();
        if (!name.ends_with(replaced_suffix)) return name.ends_with(partial_suffix);
        std::error_code ignored;
        return fs::exists(fs::path(name.substr(0, name.size() - replaced_suffix.size())), ignored);
    });
}

std::string new_run_identity() {
    std::random_device random;
    return fmt::format("{:08x}{:08x}", random(), random());
}

std::optional<RunRecord> read_last_run(const fs::path& out_dir) {
    const fs::path file = record_file(out_dir);
    std::error_code error;
    if (fs::status(file, error).type() == fs::file_type::not_found) return std::nullopt;
    try {
        const auto json = nlohmann::json::parse(read_file(file));
        const fs::path began_from = json.at("began_from").get<std::string>();
        // For a checkpoint next to this file the name is enough, because the directory may have been moved.
        return RunRecord{.identity = json.at("run").get<std::string>(),
                         .began_from = began_from.empty() ? began_from : out_dir / began_from,
                         .branched_from = json.value("branched_from", "")};
    } catch (const nlohmann::json::exception&) {
        user_error("{} is damaged; remove it, and --resume takes the checkpoint that was saved last",
                   file.string());
    }
}

void write_last_run(const fs::path& out_dir, const RunRecord& run) {
    fs::path from = run.began_from;
    if (!from.empty()) {
        from = plain_path(from);
        // Links may lead to the same folder. The checkpoint itself may be a link to another disk.
        std::error_code ignored;
        const fs::path here = fs::weakly_canonical(from.parent_path(), ignored)
                                  .lexically_relative(fs::weakly_canonical(plain_path(out_dir), ignored));
        if (!here.empty() && *here.begin() != "..") from = (here / from.filename()).lexically_normal();
    }
    const nlohmann::ordered_json json = {
        {"run", run.identity},
        {"began_from", from.string()},
        {"branched_from", run.branched_from.empty() ? "" : plain_path(run.branched_from).string()}};
    replace_file(record_file(out_dir), json.dump() + "\n");
}

}  // namespace llmc
