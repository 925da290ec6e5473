#include "llmc/io/last_run.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <random>
#include <system_error>

#include "llmc/core/error.h"
#include "llmc/io/files.h"

namespace llmc {

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
        // Beside the file its name is enough: the directory may have been moved since.
        return RunRecord{.identity = json.at("run").get<std::string>(),
                         .began_from = began_from.empty() ? began_from : out_dir / began_from};
    } catch (const nlohmann::json::exception&) {
        user_error("{} is damaged; without it --resume takes the checkpoint that was saved last",
                   file.string());
    }
}

void write_last_run(const fs::path& out_dir, const RunRecord& run) {
    fs::path from = run.began_from;
    if (!from.empty()) {
        from = plain_path(from);
        if (from.parent_path() == plain_path(out_dir)) from = from.filename();
    }
    const nlohmann::ordered_json json = {{"run", run.identity}, {"began_from", from.string()}};
    replace_file(record_file(out_dir), json.dump() + "\n");
}

}  // namespace llmc
