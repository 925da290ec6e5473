#include "llmc/io/metrics.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/io/files.h"

namespace llmc {

namespace {

using Json = nlohmann::ordered_json;
using nlohmann::literals::operator""_json_pointer;

// Rounds to `digits` significant digits. JSON prints the shortest decimal that gives the same double, so it
// prints these digits.
double rounded(double value, int digits) {
    return std::isfinite(value) ? std::stod(fmt::format("{:.{}g}", value, digits)) : value;
}

// To the millisecond.
double seconds_since_1970() {
    using std::chrono::milliseconds, std::chrono::system_clock;
    const auto now = std::chrono::duration_cast<milliseconds>(system_clock::now().time_since_epoch());
    return static_cast<double>(now.count()) / 1e3;
}

constexpr const char* hellaswag_key = "hellaswag_acc_norm";

Json as_json(const HellaSwagScore& score) {
    return {{"hellaswag_acc", rounded(score.accuracy, 6)}, {hellaswag_key, rounded(score.accuracy_norm, 6)}};
}

// The windows of a `run` line's validations. Losses on others are not comparable.
Json windows_of(const Json& run) { return run.value("validation_windows", Json()); }

// The complete lines of the first `done` steps of the run with this identity, with its `run` line; none if
// the file belongs to another run. They end before a line that a crash cut off. A `run` line that no step follows
// is left out, unless it is the first.
// NOLINTNEXTLINE(bugprone-exception-escape): the library declares its move constructor noexcept
struct Kept {
    std::string lines;
    Json run;                                            // from the last `run` line
    std::vector<MetricsWriter::Validation> validations;  // on the data of the run that goes on
    std::int64_t last_step = 0, last_validation = 0, last_hellaswag = 0;
};
Kept lines_until(std::string_view text, std::int64_t done, const Json& going_on) {
    Kept kept;
    const Json& identity = going_on.at("identity");
    std::string resumed;  // a later `run` line, until a step follows
    for (std::size_t end = text.find('\n'); end != std::string_view::npos; end = text.find('\n')) {
        const std::string_view line = text.substr(0, end);
        const Json json = Json::parse(line, nullptr, false);
        if (!json.is_object()) break;
        if (kept.lines.empty() && json.value("/run/identity"_json_pointer, Json()) != identity) break;
        if (json.contains("step") && json["step"].is_number()) {
            const auto step = json["step"].get<std::int64_t>();
            if (step > done) break;
            kept.last_step = step;
            if (json.contains("val_loss") && json["val_loss"].is_number()) {
                kept.last_validation = step;
                if (windows_of(kept.run) == windows_of(going_on))
                    kept.validations.push_back({step, json["val_loss"]});
            }
            if (json.contains(hellaswag_key)) kept.last_hellaswag = step;
        }
        const bool holds = !json.contains("run") || kept.lines.empty();
        if (holds) kept.lines += std::exchange(resumed, "");
        if (json.contains("run")) kept.run = json["run"];
        (holds ? kept.lines : resumed = "").append(line).append("\n");
        text.remove_prefix(end + 1);
    }
    return kept;
}

// Keeps the steps of another run: FILE stays as FILE.1, or with the first free number. Returns that name.
std::filesystem::path kept_as(const std::filesystem::path& file) {
    int number = 1;
    const auto numbered = [&] { return std::filesystem::path(fmt::format("{}.{}", file.string(), number)); };
    std::error_code error;
    while (std::filesystem::exists(numbered(), error)) ++number;
    std::filesystem::create_hard_link(file, numbered(), error);
    if (error) std::filesystem::copy_file(file, numbered(), error);
    if (error) user_error("cannot write {}: {}", numbered().string(), error.message());
    return numbered();
}

}  // namespace

std::optional<std::filesystem::path> replaced_metrics(const std::filesystem::path& path) {
    std::error_code ignored;
    if (path.string().starts_with("/dev/") || path.string().starts_with("/proc/")) return std::nullopt;
    const auto status = std::filesystem::status(path, ignored);
    if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) return std::nullopt;
    return link_target(path);
}

bool holds_steps(const std::filesystem::path& file) {
    std::error_code ignored;
    if (!std::filesystem::is_regular_file(file, ignored)) return false;
    std::ifstream stream(file);
    std::string line;
    // The first line is the `run` line.
    return std::getline(stream, line) && std::getline(stream, line);
}

std::int64_t last_step(const std::filesystem::path& file) {
    std::error_code ignored;
    if (!std::filesystem::is_regular_file(file, ignored)) return 0;
    std::ifstream stream(file);
    std::int64_t step = 0;
    for (std::string line; std::getline(stream, line);) {
        const Json json = Json::parse(line, nullptr, false);
        if (json.is_object()) step = json.value("step", step);
    }
    return step;
}

// The open file. Nothing is buffered here, so that it is known which bytes the system has taken.
class MetricsWriter::File {
  public:
    explicit File(const std::filesystem::path& path)
        : descriptor_(::open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC)) {
        if (descriptor_ < 0) user_error("cannot write {}: {}", path.string(), std::strerror(errno));
    }
    ~File() { close(descriptor_); }
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    // Removes from `text` what the system takes. Returns 0, or the reason why something is left.
    int write(std::string& text) const {
        while (!text.empty()) {
            const ssize_t written = ::write(descriptor_, text.data(), text.size());
            if (written < 0 && errno != EINTR) return errno;
            if (written > 0) text.erase(0, static_cast<std::size_t>(written));
        }
        return 0;
    }

  private:
    int descriptor_;
};

MetricsWriter::MetricsWriter(std::filesystem::path path, const Json& run, std::int64_t done)
    : path_(std::move(path)) {
    if (path_.has_parent_path()) make_directory(path_.parent_path());
    std::error_code ignored;
    const std::optional<std::filesystem::path> replaced = replaced_metrics(path_);
    const bool regular = replaced.has_value();
    if (regular) path_ = *replaced;
    const bool goes_on = done > 0 && regular && std::filesystem::exists(path_, ignored);
    Kept earlier = goes_on ? lines_until(read_file(path_), done, run) : Kept{};
    std::string& lines = earlier.lines;
    const bool belongs_to_another_run = regular && lines.empty() && holds_steps(path_);
    // A resumed run may have another mesh or more steps. It then writes a new `run` line at that point.
    if (lines.empty() || earlier.run != run) lines += Json{{"run", run}}.dump() + "\n";
    earlier_ = std::move(earlier.validations);
    const bool has_last = goes_on && earlier.last_step == done;
    lacks_validation_ = has_last && earlier.last_validation != done;
    lacks_hellaswag_ = has_last && earlier.last_hellaswag != done;
    // A crash or a full disk at this point must not lose lines of an earlier run, so the file is replaced as
    // a whole.
    if (belongs_to_another_run) moved_to_ = kept_as(path_);
    try {
        if (regular) replace_file(path_, lines);
    } catch (const UserError&) {
        if (belongs_to_another_run) std::filesystem::remove(moved_to_, ignored);
        throw;
    }
    open();
    if (!regular) write_line(lines);
    if (!failure_.empty()) user_error("{}", failure_);
}

MetricsWriter::~MetricsWriter() = default;

void MetricsWriter::open() { file_ = std::make_unique<File>(path_); }

void MetricsWriter::add_validation(double loss) { add_to_last_line({{"val_loss", rounded(loss, 9)}}); }

void MetricsWriter::add_hellaswag(const HellaSwagScore& score) { add_to_last_line(as_json(score)); }

void MetricsWriter::write_evaluation(std::int64_t step, std::int64_t tokens,
                                     const std::optional<double>& val_loss,
                                     const std::optional<HellaSwagScore>& hellaswag) {
    if (!val_loss && !hellaswag) return;
    Json line = {{"step", step}, {"tokens", tokens}};
    if (val_loss) line["val_loss"] = rounded(*val_loss, 9);
    if (hellaswag) line.update(as_json(*hellaswag));
    line["time"] = seconds_since_1970();
    write_line(line.dump() + "\n");
    if (!failure_.empty()) user_error("{}", failure_);
}

void MetricsWriter::add_to_last_line(const Json& more) {
    std::string lines = read_file(path_);
    // This run's `run` line may follow it.
    const std::size_t last = lines.rfind("\n{\"step\":") + 1, length = lines.find('\n', last) - last;
    Json line = Json::parse(lines.substr(last, length));
    line.update(more);
    lines.replace(last, length, line.dump());
    replace_file(path_, lines);
    open();
}

void MetricsWriter::write(const StepMetrics& metrics) {
    Json phases;
    for (const Phase phase : all_phases) {
        if (phase == Phase::disk && !metrics.disk) continue;
        phases[std::string(name_of(phase))] = rounded(metrics.phase_ms[phase], 6);
    }
    Json line = {
        {"step", metrics.step},
        {"loss", rounded(metrics.loss, 9)},
        {"grad_norm", metrics.grad_norm ? Json(rounded(*metrics.grad_norm, 9)) : Json()},
        {"lr", metrics.learning_rate},
        {"tokens", metrics.tokens},
        {"tokens_per_s", rounded(metrics.tokens_per_second, 6)},
        {"step_ms", rounded(metrics.step_ms, 6)},
        {"phase_ms", phases},
        {"time", seconds_since_1970()},
    };
    if (metrics.targets) line["targets"] = *metrics.targets;
    if (metrics.model_flops_utilization) line["mfu"] = rounded(*metrics.model_flops_utilization, 4);
    if (const auto& disk = metrics.disk)
        line["disk"] = {{"read_bytes", disk->read_bytes},
                        {"written_bytes", disk->written_bytes},
                        {"ms", std::round(1e3 * disk->ms) / 1e3}};
    if (metrics.loss_scale) line["loss_scale"] = *metrics.loss_scale;
    if (metrics.skipped_steps) line["skipped_steps"] = *metrics.skipped_steps;
    if (metrics.val_loss) line["val_loss"] = rounded(*metrics.val_loss, 9);
    if (metrics.hellaswag) line.update(as_json(*metrics.hellaswag));
    write_line(line.dump() + "\n");
}

void MetricsWriter::write_line(std::string_view line) {
    kept_ += line;
    const int reason = file_->write(kept_);
    failure_ = reason == 0 ? "" : fmt::format("cannot write {}: {}", path_.string(), std::strerror(reason));
}

}  // namespace llmc
