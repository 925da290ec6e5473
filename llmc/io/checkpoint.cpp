#include "llmc/io/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "llmc/comm/texts_of_ranks.h"
#include "llmc/comm/values_of_ranks.h"
#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/io/files.h"
#include "llmc/io/model_files.h"
#include "llmc/io/own_files.h"
#include "llmc/model/low_rank.h"

namespace llmc {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr const char* format = "train_gpt checkpoint";
constexpr int version = 3, older_version = 2;  // the older one is only read
constexpr const char* model_file = "model.safetensors";
constexpr const char* optimizer_file = "optimizer.safetensors";
constexpr const char* tokenizer_folder = "tokenizer";
constexpr const char* manifest_file = "manifest.json";
constexpr const char* own_checksum = "xxh3_128";  // key of the checksum of the manifest without this entry
constexpr const char* older_state_prefix = "optim.state.";  // which the names of version 2 lack

void require_size(const fs::path& path, std::uint64_t expected) {
    std::error_code error;
    const std::uintmax_t bytes = fs::file_size(path, error);
    if (error) user_error("the checkpoint is damaged: {}: {}", path.string(), error.message());
    if (bytes != expected) {
        user_error("the checkpoint is damaged: {} has {}, but its manifest says {}; take an older one",
                   path.string(), plural(static_cast<std::int64_t>(bytes), "byte"),
                   grouped(static_cast<std::int64_t>(expected)));
    }
}

void verify_file(const fs::path& path, const Json& expected) {
    require_size(path, expected.at("bytes"));
    if (checksum(path) != expected.at("xxh3_128").get<std::string>()) {
        user_error(
            "the checkpoint is damaged: {} does not have the checksum in its manifest; take an older one",
            path.string());
    }
}

[[noreturn]] void refuse_manifest(const fs::path& path) {
    user_error("the checkpoint is damaged: {} is not a manifest; take an older one", path.string());
}

std::string text_of(const Json& manifest) { return manifest.dump(2) + "\n"; }

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
        const std::string text = read_file(path);
        Json manifest = Json::parse(text);
        const Json& found = manifest.at("version");
        if (manifest.at("format") != format || (found != version && found != older_version)) {
            user_error("{} is not a manifest that this program can read ({}, versions {} and {})",
                       path.string(), format, older_version, version);
        }
        // The checksum is that of the entries, not of the text.
        bool is_damaged = found == version && text != text_of(manifest);
        const std::string expected = manifest.at(own_checksum);
        manifest.erase(own_checksum);
        is_damaged = is_damaged || checksum_of_text(manifest.dump()) != expected;
        if (is_damaged) {
            user_error("the checkpoint is damaged: {} does not match its own checksum; take an older one",
                       path.string());
        }
        return manifest;
    } catch (const Json::exception&) {
        refuse_manifest(path);
    }
}

// Verifies the files that the manifest names and whose names have this beginning. Returns their number and bytes.
VerifiedCheckpoint verify_files(const fs::path& directory, const Json& manifest, std::string_view beginning) {
    VerifiedCheckpoint verified;
    for (const auto& [file, expected] : manifest.at("files").items()) {
        if (!file.starts_with(beginning)) continue;
        verify_file(directory / file, expected);
        ++verified.files;
        verified.bytes += expected.at("bytes").get<std::uint64_t>();
    }
    return verified;
}

// The tensors of a checkpoint, by its manifest, the files of checksums and the headers. The blocks of files are
// verified when they are read; the files of version 2 are read here to verify them.
StoredTensors tensors_of(const fs::path& directory, const Json& manifest, bool with_state) {
    StoredTensors stored(directory);
    if (manifest.at("version") == older_version) {
        for (const auto& [name, prefix] : {std::pair(model_file, ""), {optimizer_file, older_state_prefix}}) {
            if (name == optimizer_file && !with_state) continue;
            verify_file(directory / name, manifest.at("files").at(name));
            stored.add(directory / name, {}, prefix);
        }
    } else {
        verify_files(directory, manifest, checksums_prefix);
        for (const auto& [of_rank, sealed] : manifest.at("files").items()) {
            if (!of_rank.starts_with(checksums_prefix)) continue;
            const Json checksums = Json::parse(read_file(directory / of_rank));
            if (checksums.at("block_bytes") != checksum_block)
                user_error("{}: its blocks are not those of this program", (directory / of_rank).string());
            for (const auto& [name, file] : checksums.at("files").items()) {
                if (name.starts_with(state_files_prefix) && !with_state) continue;
                const std::uint64_t bytes = file.at("bytes");
                require_size(directory / name, bytes);
                std::vector<std::string> blocks = file.at("blocks");
                if (blocks.size() != (bytes + checksum_block - 1) / checksum_block)
                    user_error("{}: {} has another number of blocks", (directory / of_rank).string(), name);
                stored.add(directory / name, std::move(blocks));
            }
        }
    }
    stored.require_whole();
    return stored;
}

StoredTensors tensors_of(const fs::path& directory, bool with_state) {
    const Json manifest = read_manifest(directory);
    try {
        return tensors_of(directory, manifest, with_state);
    } catch (const Json::exception&) {
        refuse_manifest(directory / manifest_file);
    } catch (const UserError& fault) {
        if (std::string_view(fault.what()).starts_with(damage_prefix)) throw;
        user_error("{}{}", damage_prefix, fault.what());
    }
}

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

Json describe_file(const fs::path& path) {
    return {{"bytes", fs::file_size(path)}, {"xxh3_128", checksum(path)}};
}

// The manifest without its files and its checksum.
Json describe(const CheckpointContents& contents) {
    const Progress& progress = contents.progress;
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    Json manifest = {
        {"format", format},
        {"version", version},
        {"run", contents.run},
        {"lineage", contents.lineage},
        {"step", progress.step},
        {"samples", progress.samples},
        {"skipped_steps", progress.skipped},
        {"skipped_in_a_row", progress.skipped_in_a_row},
        {"loss_scale", to_json(progress.loss_scale)},
        {"fp8", to_json(progress.fp8)},
        {"saved_at", std::chrono::duration_cast<std::chrono::nanoseconds>(now).count()},
        {"configuration", Json::parse(contents.configuration)},
        {"data", Json::parse(contents.data)},
        {"device_choices", contents.device_choices},
    };
    if (const auto& validation = contents.validation)
        manifest["validation"] = {{"loss", validation->loss}, {"windows", validation->windows}};
    if (const auto& previous = contents.previous)
        manifest["previous"] = {{"run", previous->run}, {"step", previous->step}};
    if (const auto& base = contents.base)
        manifest["base"] = {{"weights", base->weights}, {"checksum", base->checksum}};
    return manifest;
}

// Writes what rank 0 alone writes, when all ranks have written their files, and gives the folder its name.
void finish_checkpoint(const fs::path& folder, const fs::path& final_name, const CheckpointContents& contents,
                       std::span<const SealedFile> sealed) {
    const TokenizerFiles& tokenizer = contents.tokenizer;
    Json manifest = describe(contents);
    manifest["files"] = Json::object();
    for (std::size_t rank = 0; rank < sealed.size(); ++rank) {
        const SealedFile& file = sealed[rank];
        if (file.bytes == 0) continue;
        manifest["files"][checksums_name(static_cast<int>(rank))] = {
            {"bytes", file.bytes}, {"xxh3_128", std::string(file.checksum.begin(), file.checksum.end())}};
    }
    if (!tokenizer.empty()) {
        write_tokenizer_files(folder / tokenizer_folder, tokenizer);
        for (const auto& [name, text] : tokenizer) {
            const fs::path file = fs::path(tokenizer_folder) / name;
            manifest["files"][file.string()] = describe_file(folder / file);
        }
        sync_directory(folder / tokenizer_folder);
    }
    manifest[own_checksum] = checksum_of_text(manifest.dump());
    write_file(folder / manifest_file, text_of(manifest));
    sync_directory(folder);
    replace_directory(folder, final_name);
}

// Reads what ranks keep. Where a read brings all of a unit's offloaded parameters to the device, it reads them once.
class KeptReader {
  public:
    explicit KeptReader(const ParameterStore& store) : store_(store) {}

    void operator()(int unit, Kept kept, const ElementRange& run, std::span<std::byte> bytes) {
        if (!store_.reads_offloaded_parameters(unit, kept)) return store_.read_stored(unit, kept, run, bytes);
        const std::size_t size = size_of(store_.dtype_in_files(unit, kept));
        if (unit != unit_) {
            const ElementRange all{0, store_.updated(unit).size()};
            all_.resize(static_cast<std::size_t>(all.size()) * size);
            store_.read_stored(unit, kept, all, all_);
            unit_ = unit;
        }
        std::copy_n(all_.begin() + run.begin * static_cast<std::int64_t>(size), bytes.size(), bytes.begin());
    }

  private:
    const ParameterStore& store_;
    int unit_ = -1;
    std::vector<std::byte> all_;
};

}  // namespace

SavedBytes saved_bytes(const Outline& outline, const StoreDtypes& dtypes) {
    SavedBytes bytes;
    for (const Outline::OutlinedUnit& unit : outline.units) {
        for (const ParamSpec& spec : unit.spec.params) {
            const auto elements = static_cast<std::uint64_t>(spec.shape.elements());
            (is_of_adapter(unit.spec.name) ? bytes.adapters : bytes.weights) += elements * sizeof(float);
            if (spec.is_frozen) continue;
            const DType weights = dtypes.keeps_master() ? DType::fp32 : dtypes.compute,
                        moments = dtypes.moments_of(unit);
            const std::size_t state = dtypes.optimizer_of(unit, spec).state.size();
            bytes.checkpoint +=
                elements *
                (size_of(weights) + state * (moments == DType::uint8 ? sizeof(float) : size_of(moments)));
        }
    }
    return bytes;
}

CheckpointSave::CheckpointSave(const fs::path& out_dir, CheckpointContents contents,
                               const ParameterStore& store, const UnitTransfer& transfer)
    : contents_(std::move(contents)),
      is_root_(transfer.world().rank() == 0),
      rank_(transfer.world().rank()),
      // The folder of rank 0: it may have chosen the name of a new run's folder.
      path_(text_of_root(transfer.world(),
                         [&] { return (out_dir / checkpoint_name(contents_.progress.step)).string(); })),
      partial_(path_.string() + std::string(partial_suffix)),
      files_(plan_own_files(store, ModelPlaces(transfer.mesh(), transfer.parts()), rank_)) {
    together(transfer.world(), [&] {
        if (!is_root_) return;
        std::error_code ignored;
        fs::remove_all(partial_, ignored);  // left by an interrupted save
        make_directory(partial_);
    });
}

void CheckpointSave::write(const ReadKept& read) { own_ = write_own_files(partial_, rank_, files_, read); }

void CheckpointSave::gather(Communicator& world) { sealed_ = values_of_ranks(world, own_); }

void CheckpointSave::complete() const { finish_checkpoint(partial_, path_, contents_, sealed_); }

void CheckpointSave::abandon() const {
    std::error_code ignored;
    if (is_root_) fs::remove_all(partial_, ignored);
}

fs::path save_checkpoint(const fs::path& out_dir, CheckpointContents contents, const ParameterStore& store,
                         const UnitTransfer& transfer) {
    Communicator& world = transfer.world();
    CheckpointSave save(out_dir, std::move(contents), store, transfer);
    try {
        together(world, [&] { save.write(KeptReader(store)); });
        save.gather(world);
        together(world, [&] {
            if (world.rank() == 0) save.complete();
        });
    } catch (const UserError&) {
        save.abandon();
        throw;
    }
    return save.path();
}

CheckpointInfo read_checkpoint(const fs::path& directory) {
    const Json manifest = read_manifest(directory);
    try {
        CheckpointInfo info{
            .directory = directory,
            .version = manifest.at("version"),
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
        if (const auto previous = manifest.find("previous"); previous != manifest.end())
            info.previous = {previous->at("run"), previous->at("step")};
        if (const auto base = manifest.find("base"); base != manifest.end())
            info.base = {base->at("weights"), base->at("checksum")};
        return info;
    } catch (const Json::exception&) {
        refuse_manifest(directory / manifest_file);
    }
}

fs::path tokenizer_in(const CheckpointInfo& checkpoint) {
    std::error_code ignored;
    if (!fs::exists(checkpoint.directory, ignored)) return {};  // it is gone; loading the weights says so
    const Json manifest = read_manifest(checkpoint.directory);
    try {
        verify_files(checkpoint.directory, manifest, std::string(tokenizer_folder) + "/");
    } catch (const Json::exception&) {
        refuse_manifest(checkpoint.directory / manifest_file);
    }
    const fs::path folder = checkpoint.directory / tokenizer_folder;
    return fs::is_directory(folder, ignored) ? folder : fs::path();
}

StoredTensors find_weights(const fs::path& path) {
    std::error_code ignored;
    return fs::exists(path / manifest_file, ignored) ? tensors_of(path, false) : find_tensors(path);
}

bool has_weights(const fs::path& directory) {
    std::error_code error;
    for (fs::directory_iterator entries(directory, error); !error && entries != fs::directory_iterator();
         entries.increment(error)) {
        const std::string name = entries->path().filename().string();
        if (name == model_file || name.starts_with(weights_prefix)) return true;
    }
    return false;
}

void load_checkpoint(const CheckpointInfo& checkpoint, ParameterStore& store, const UnitTransfer& transfer,
                     bool with_state) {
    try {
        load_stored([&] { return tensors_of(checkpoint.directory, with_state); }, store, transfer,
                    checkpoint.base ? Tensors::adapters : Tensors::weights, with_state,
                    checkpoint.version == older_version);
    } catch (const UserError& fault) {  // all ranks have the same headers, and read the blocks together
        throw SharedError(fault.what());
    }
}

VerifiedCheckpoint verify_checkpoint(const fs::path& directory) {
    const Json manifest = read_manifest(directory);
    try {
        VerifiedCheckpoint verified = verify_files(directory, manifest, "");
        verified.step = manifest.at("step");
        const StoredTensors stored = tensors_of(directory, manifest, true);
        std::vector<std::byte> bytes;
        for (const StoredFile& file : stored.files()) {
            if (file.checksums.empty()) continue;  // verified above
            const InputFile input(file.path);
            for (std::uint64_t begin = 0; begin < file.bytes; begin += checksum_block) {
                bytes.resize(std::min(checksum_block, file.bytes - begin));
                input.read_at(begin, bytes);
                require_checksum(file, begin, bytes);
            }
            ++verified.files;
            verified.bytes += file.bytes;
        }
        return verified;
    } catch (const Json::exception&) {
        refuse_manifest(directory / manifest_file);
    }
}

}  // namespace llmc
