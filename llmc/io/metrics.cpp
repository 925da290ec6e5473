#include "llmc/io/metrics.h"

#include <fmt/format.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <string_view>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/io/files.h"

namespace llmc {

namespace {

using Json = nlohmann::ordered_json;

// JSON prints the shortest decimal that gives the same double, so a value rounded to so many digits is
// printed with them.
double rounded(double value, int digits) {
    return std::isfinite(value) ? std::stod(fmt::format("{:.{}g}", value, digits)) : value;
}

// The whole lines of the first `done` steps, the run's line included. A line cut off by a crash ends them.
std::string lines_until(std::string_view text, std::int64_t done) {
    std::string kept;
    for (std::size_t end = text.find('\n'); end != std::string_view::npos; end = text.find('\n')) {
        const std::string_view line = text.substr(0, end);
        const Json json = Json::parse(line, nullptr, false);
        if (!json.is_object()) break;
        if (json.contains("step") && json["step"].is_number() && json["step"].get<std::int64_t>() > done)
            break;
        kept += line;
        kept += '\n';
        text.remove_prefix(end + 1);
    }
    return kept;
}

}  // namespace

MetricsWriter::MetricsWriter(std::filesystem::path path, const Json& run, std::int64_t done)
    : path_(std::move(path)) {
    if (path_.has_parent_path()) make_directory(path_.parent_path());
    const bool regular = std::filesystem::is_regular_file(path_) || !std::filesystem::exists(path_);
    const bool goes_on = done > 0 && std::filesystem::is_regular_file(path_);
    std::string lines = goes_on ? lines_until(read_file(path_), done) : "";
    if (lines.empty()) lines = Json{{"run", run}}.dump() + "\n";
    // A crash or a full disk here must not lose the lines of an earlier run: the new file replaces it whole.
    if (regular) replace_file(path_, lines);
    file_.reset(std::fopen(path_.c_str(), "a"));
    if (!file_) fail();
    if (!regular) write_line(lines);
}

void MetricsWriter::write(const StepMetrics& metrics) {
    Json phases;
    for (const Phase phase : all_phases) {
        phases[std::string(name_of(phase))] = std::round(1e3 * metrics.phase_ms[phase]) / 1e3;
    }
    Json line = {
        {"step", metrics.step},
        {"loss", rounded(metrics.loss, 9)},
        {"grad_norm", rounded(metrics.grad_norm, 9)},
        {"lr", metrics.learning_rate},
        {"tokens", metrics.tokens},
        {"tokens_per_s", rounded(metrics.tokens_per_second, 6)},
        {"step_ms", rounded(metrics.step_ms, 6)},
        {"phase_ms", phases},
    };
    if (metrics.model_flops_utilization) line["mfu"] = rounded(*metrics.model_flops_utilization, 4);
    if (metrics.val_loss) line["val_loss"] = rounded(*metrics.val_loss, 9);
    write_line(line.dump() + "\n");
}

void MetricsWriter::write_line(const std::string& line) {
    if (std::fwrite(line.data(), 1, line.size(), file_.get()) != line.size() ||
        std::fflush(file_.get()) != 0) {
        fail();
    }
}

void MetricsWriter::fail() const { user_error("cannot write {}: {}", path_.string(), std::strerror(errno)); }

}  // namespace llmc
