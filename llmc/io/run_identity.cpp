#include "llmc/io/run_identity.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <random>

#include "llmc/core/error.h"
#include "llmc/io/files.h"

namespace llmc {

namespace {

std::filesystem::path identity_file(const std::filesystem::path& out_dir) { return out_dir / "run.json"; }

}  // namespace

std::string new_run_identity() {
    std::random_device random;
    return fmt::format("{:08x}{:08x}", random(), random());
}

std::optional<std::string> read_run_identity(const std::filesystem::path& out_dir) {
    const std::filesystem::path file = identity_file(out_dir);
    if (!std::filesystem::exists(file)) return std::nullopt;
    try {
        return nlohmann::json::parse(read_file(file)).at("run").get<std::string>();
    } catch (const nlohmann::json::exception& fault) {
        user_error(
            "{} is damaged: {}; remove it to go on from the newest checkpoint beside it, whosever it is",
            file.string(), fault.what());
    }
}

void write_run_identity(const std::filesystem::path& out_dir, const std::string& run) {
    replace_file(identity_file(out_dir), nlohmann::json{{"run", run}}.dump() + "\n");
}

}  // namespace llmc
