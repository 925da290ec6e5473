#include "llmc/io/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/io/files.h"
#include "llmc/io/model_files.h"
#include "llmc/io/weight_files.h"

namespace llmc {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr const char* format = "train_gpt checkpoint";
constexpr int version = 2;
constexpr const char* model_file = "model.safetensors";
constexpr const char* optimizer_file = "optimizer.safetensors";
constexpr const char* tokenizer_folder = "tokenizer";
constexpr const char* manifest_file = "manifest.json";
constexpr const char* own_checksum = "xxh3_128";  // key of the checksum of the manifest without this entry
constexpr std::string_view name_prefix = "checkpoint-";

constexpr std::string_view partial_suffix = ".partial";

// checkpoint-<step>. Other names in the directory belong to the user or to unfinished checkpoints.
std::string name_of_step(std::int64_t step) { return fmt::format("{}{:08}", name_prefix, step); }

// The step in a checkpoint's name. Empty if save_checkpoint gives no such name, as for checkpoint-99.
std::optional<std::int64_t> step_of_name(const std::string& name) {
    if (!name.starts_with(name_prefix)) return std::nullopt;
    const char* const end = name.data() + name.size();
    std::int64_t step = 0;
    const auto read = std::from_chars(name.data() + name_prefix.size(), end, step);
    if (read.ec != std::errc() || read.ptr != end || name != name_of_step(step)) return std::nullopt;
    return step;
}

Json describe_file(const fs::path& path) {
    return {{"bytes", fs::file_size(path)}, {"xxh3_128", checksum(path)}};
}

void verify_file(const fs::path& path, const Json& expected) {
    std::error_code error;
    const std::uintmax_t bytes = fs::file_size(path, error);
    if (error) user_error("the checkpoint is damaged: {}: {}", path.string(), error.message());
    if (bytes != expected.at("bytes").get<std::uintmax_t>()) {
        user_error("the checkpoint is damaged: {} has {}, but its manifest says {}; take an older one",
                   path.string(), plural(static_cast<std::int64_t>(bytes), "byte"),
                   grouped(expected.at("bytes").get<std::int64_t>()));
    }
    if (checksum(path) != expected.at("xxh3_128").get<std::string>()) {
        user_error(
            "the checkpoint is damaged: {} does not have the checksum in its manifest; take an older one",
            path.string());
    }
}

[[noreturn]] void refuse_manifest(const fs::path& path) {
    user_error("the checkpoint is damaged: {} is not a manifest; take an older one", path.string());
}

Json read_manifest(const fs::path& directory) {
    const fs::path path = directory / manifest_file;
    std::error_code error;
    const fs::file_status status = fs::status(directory, error);
    if (status.type() == fs::file_type::none)
        user_error("no checkpoint: {}: {}", directory.string(), error.message());
    if (!fs::is_directory(status)) user_error("no checkpoint: {} is not a directory", directory.string());
    if (fs::status(path, error).type() == fs::file_type::not_found) {
        const fs::path weights = directory / model_file;
        user_error("no checkpoint: {} contains neither {} nor a run's checkpoints; {}", directory.string(),
                   manifest_file,
                   fs::exists(weights, error)
                       ? fmt::format("for its weights alone, give --init {}", weights.string())
                       : "give the directory of a checkpoint or of a run");
    }
    try {
        Json manifest = Json::parse(read_file(path));
        if (manifest.at("format") != format || manifest.at("version") != version) {
            user_error("{} is not a manifest that this program can read ({}, version {})", path.string(),
                       format, version);
        }
        const std::string expected = manifest.at(own_checksum);
        manifest.erase(own_checksum);
        if (checksum_of_text(manifest.dump()) != expected) {
            user_error("the checkpoint is damaged: {} does not match its own checksum; take an older one",
                       path.string());
        }
        return manifest;
    } catch (const Json::exception&) {
        refuse_manifest(path);
    }
}

// Verifies the files whose names have this beginning. The manifest must name the weights and the optimizer's state.
void verify_files(const fs::path& directory, bool with_state, std::string_view beginning = "") {
    const Json manifest = read_manifest(directory);
    try {
        for (const char* file : {model_file, optimizer_file})
            static_cast<void>(manifest.at("files").at(file));
        for (const auto& [file, expected] : manifest.at("files").items()) {
            if (file.starts_with(beginning) && (file != optimizer_file || with_state))
                verify_file(directory / file, expected);
        }
    } catch (const Json::exception&) {
        refuse_manifest(directory / manifest_file);
    }
}

}  // namespace

bool is_checkpoint_name(std::string_view name) {
    if (name.ends_with(partial_suffix)) name.remove_suffix(partial_suffix.size());
    return step_of_name(std::string(name)).has_value();
}

namespace {

Json to_json(const std::optional<LossScale>& state) {
    if (!state) return nullptr;
    return {{"scale", state->scale},
            {"good_steps", state->good_steps},
            {"hysteresis_left", state->hysteresis_left}};
}

// Older checkpoints have none.
std::optional<LossScale> loss_scale_in(const Json& manifest) {
    const auto found = manifest.find("loss_scale");
    if (found == manifest.end() || found->is_null()) return std::nullopt;
    return LossScale{found->at("scale"), found->at("good_steps"), found->at("hysteresis_left")};
}

Json to_json(const std::optional<Fp8History>& history) {
    if (!history) return nullptr;
    return {{"amax", history->amax}, {"seen", history->seen}};
}

std::optional<Fp8History> fp8_history_in(const Json& manifest) {
    const auto found = manifest.find("fp8");
    if (found == manifest.end() || found->is_null()) return std::nullopt;
    return Fp8History{found->at("amax"), found->at("seen")};
}

void write_checkpoint(const fs::path& folder, const std::string& run, const std::string& lineage,
                      const Progress& progress, const Json& configuration, const std::string& data,
                      const std::string& device_choices, const ParameterStore& store, UnitTransfer& transfer,
                      const TokenizerFiles& tokenizer, const std::optional<Validation>& validation) {
    if (transfer.is_root()) make_directory(folder);
    save_weights(folder / model_file, store, transfer, true);
    save_state(folder / optimizer_file, store, transfer, true);
    if (!transfer.is_root()) return;

    const auto now = std::chrono::system_clock::now().time_since_epoch();
    Json manifest = {
        {"format", format},
        {"version", version},
        {"run", run},
        {"lineage", lineage},
        {"step", progress.step},
        {"samples", progress.samples},
        {"skipped_steps", progress.skipped},
        {"skipped_in_a_row", progress.skipped_in_a_row},
        {"loss_scale", to_json(progress.loss_scale)},
        {"fp8", to_json(progress.fp8)},
        {"saved_at", std::chrono::duration_cast<std::chrono::nanoseconds>(now).count()},
        {"configuration", configuration},
        {"data", Json::parse(data)},
        {"device_choices", device_choices},
    };
    if (validation) manifest["validation"] = {{"loss", validation->loss}, {"windows", validation->windows}};
    manifest["files"] = {{model_file, describe_file(folder / model_file)},
                         {optimizer_file, describe_file(folder / optimizer_file)}};
    if (!tokenizer.empty()) {
        write_tokenizer_files(folder / tokenizer_folder, tokenizer);
        for (const auto& [name, text] : tokenizer) {
            const fs::path file = fs::path(tokenizer_folder) / name;
            manifest["files"][file.string()] = describe_file(folder / file);
        }
        sync_directory(folder / tokenizer_folder);
    }
    manifest[own_checksum] = checksum_of_text(manifest.dump());
    write_file(folder / manifest_file, manifest.dump(2) + "\n");
    sync_directory(folder);
}

}  // namespace

fs::path save_checkpoint(const fs::path& out_dir, const std::string& run, const std::string& lineage,
                         const Progress& progress, const Json& configuration, const std::string& data,
                         const std::string& device_choices, const ParameterStore& store,
                         UnitTransfer& transfer, const TokenizerFiles& tokenizer,
                         const std::optional<Validation>& validation) {
    fs::path final_name = out_dir / name_of_step(progress.step);
    fs::path partial = final_name;
    partial += partial_suffix;
    const auto write = [&] {
        write_checkpoint(partial, run, lineage, progress, configuration, data, device_choices, store,
                         transfer, tokenizer, validation);
    };
    if (!transfer.is_root()) {
        write();
        return final_name;
    }
    std::error_code ignored;
    fs::remove_all(partial, ignored);  // left by an interrupted save
    try {
        write();
    } catch (const UserError&) {
        fs::remove_all(partial, ignored);
        throw;
    }
    replace_directory(partial, final_name);
    sync_directory(out_dir);
    return final_name;
}

CheckpointInfo read_checkpoint(const fs::path& directory) {
    const Json manifest = read_manifest(directory);
    try {
        CheckpointInfo info{
            .directory = directory,
            .run = manifest.at("run"),
            .lineage = manifest.at("lineage"),
            .progress = {.step = manifest.at("step"),
                         .samples = manifest.at("samples"),
                         .skipped = manifest.value("skipped_steps", std::int64_t{0}),
                         .skipped_in_a_row = manifest.value("skipped_in_a_row", std::int64_t{0}),
                         .loss_scale = loss_scale_in(manifest),
                         .fp8 = fp8_history_in(manifest)},
            .configuration = manifest.at("configuration").dump(),
            .saved_at = manifest.at("saved_at"),
            .device_choices = manifest.value("device_choices", ""),
            .data = manifest.contains("data") ? manifest.at("data").dump() : ""};
        if (const auto validation = manifest.find("validation"); validation != manifest.end())
            info.validation = {validation->at("loss"), validation->at("windows")};
        return info;
    } catch (const Json::exception&) {
        refuse_manifest(directory / manifest_file);
    }
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

std::optional<CheckpointInfo> newest_checkpoint(const fs::path& out_dir,
                                                const std::optional<std::string>& run) {
    std::vector<CheckpointInfo> found;
    std::int64_t last_readable = -1;            // the latest step of a readable checkpoint of any run
    std::map<std::int64_t, UserError> damaged;  // by step
    std::error_code error, ignored;
    if (!fs::is_directory(out_dir, error)) return std::nullopt;
    for (fs::directory_iterator entries(out_dir, error); !error && entries != fs::directory_iterator();
         entries.increment(error)) {
        const fs::directory_entry& entry = *entries;
        const auto step = step_of_name(entry.path().filename().string());
        if (!step || !entry.is_directory(ignored)) continue;
        try {
            CheckpointInfo checkpoint = read_checkpoint(entry.path());
            last_readable = std::max(last_readable, *step);
            if (!run || checkpoint.run == *run) found.push_back(std::move(checkpoint));
        } catch (const UserError& fault) {
            damaged.emplace(*step, fault);
        }
    }
    if (error) user_error("cannot read {}: {}", out_dir.string(), error.message());
    // A damaged checkpoint is ignored if a readable one of a later step exists.
    if (!damaged.empty() && last_readable < damaged.rbegin()->first)
        throw UserError(damaged.rbegin()->second);
    sort_newest_first(found);
    return found.empty() ? std::nullopt : std::optional(std::move(found.front()));
}

std::vector<CheckpointInfo> readable_checkpoints(const fs::path& out_dir) {
    std::vector<CheckpointInfo> found;
    std::error_code error;
    for (fs::directory_iterator entries(out_dir, error); !error && entries != fs::directory_iterator();
         entries.increment(error)) {
        try {
            if (step_of_name(entries->path().filename().string()))
                found.push_back(read_checkpoint(entries->path()));
        } catch (const UserError&) {
            // Not a readable checkpoint.
        }
    }
    sort_newest_first(found);
    return found;
}

std::optional<CheckpointInfo> newest_whole(const std::vector<CheckpointInfo>& checkpoints) {
    for (const CheckpointInfo& checkpoint : checkpoints) {
        try {
            verify_files(checkpoint.directory, true);
            return checkpoint;
        } catch (const UserError&) {
            // Damaged: try the next one.
        }
    }
    return std::nullopt;
}

void remove_checkpoints(const std::filesystem::path& directory, const std::filesystem::path& kept) {
    std::error_code error;
    std::vector<std::filesystem::path> old;
    for (std::filesystem::directory_iterator entries(directory, error);
         !error && entries != std::filesystem::directory_iterator(); entries.increment(error)) {
        if (is_checkpoint_name(entries->path().filename().string()) && entries->path() != kept)
            old.push_back(entries->path());
    }
    for (const std::filesystem::path& path : old) std::filesystem::remove_all(path, error);
}

fs::path tokenizer_in(const CheckpointInfo& checkpoint) {
    std::error_code ignored;
    if (!fs::exists(checkpoint.directory, ignored)) return {};  // it is gone; loading the weights says so
    verify_files(checkpoint.directory, false, std::string(tokenizer_folder) + "/");
    const fs::path folder = checkpoint.directory / tokenizer_folder;
    return fs::is_directory(folder, ignored) ? folder : fs::path();
}

std::filesystem::path weights_in(const std::filesystem::path& path) {
    std::error_code ignored;
    return std::filesystem::is_directory(path, ignored) && !is_model_folder(path) ? path / model_file : path;
}

void load_checkpoint(const CheckpointInfo& checkpoint, ParameterStore& store, UnitTransfer& transfer,
                     bool with_state) {
    if (transfer.is_root()) verify_files(checkpoint.directory, with_state);
    load_weights(checkpoint.directory / model_file, store, transfer);
    if (with_state) load_state(checkpoint.directory / optimizer_file, store, transfer);
}

namespace {

namespace fs = std::filesystem;

fs::path record_file(const fs::path& out_dir) { return out_dir / "run.json"; }

}  // namespace

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
