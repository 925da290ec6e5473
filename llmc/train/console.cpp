#include "llmc/train/console.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/timeline/pipeline_timeline.h"

namespace llmc {

namespace {

// The heading of the step lines is repeated this often, so that it stays on the screen.
constexpr std::int64_t lines_per_heading = 40;
constexpr int widest = 100;

std::string rule(std::string_view title, int columns) {
    const std::string begin = fmt::format("-- {} ", title);
    return fmt::format("{:-<{}}", begin, std::max<int>(columns, static_cast<int>(begin.size())));
}

}  // namespace

std::string progress_line(std::int64_t first, std::int64_t done, std::int64_t total, double seconds,
                          int columns) {
    const double share = total > 0 ? static_cast<double>(done) / static_cast<double>(total) : 1.0;
    const std::int64_t here = done - first + 1;
    const std::string left =
        here > 0 ? clock_time(seconds / static_cast<double>(here) * static_cast<double>(total - done)) : "?";
    const std::string percent = fmt::format("{:3.0f}%", std::floor(100 * share));
    std::string count = fmt::format("{}/{}", grouped(done), grouped(total));
    const std::string text =
        fmt::format("{}  {}  {} passed, {} left", percent, count, clock_time(seconds), left);
    const std::int64_t width = std::min<std::int64_t>(30, columns - std::ssize(text) - 3);
    if (width < 4) {
        for (const std::string& shorter : {text, fmt::format("{}  {}  {} left", percent, count, left),
                                           fmt::format("{}  {} left", count, left)}) {
            if (std::ssize(shorter) <= columns) return shorter;
        }
        return count;
    }
    const auto filled = static_cast<std::int64_t>(share * static_cast<double>(width));
    std::string bar = fmt::format("{:=<{}}", "", filled);
    if (filled < width) bar += '>';
    return fmt::format("[{:<{}}] {}", bar, width, text);
}

// Returns `before` and the progress line; only `before` once all steps are done; nothing without a status
// line.
std::string Console::progress(std::string_view before) const {
    if (!terminal_.has_status() || is_quiet_) return "";
    if (done_ == total_) return std::string(before);
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start_;
    const int columns = terminal_.columns() - 1 - static_cast<int>(before.size());
    return std::string(before) + progress_line(first_, done_, total_, passed.count(), columns);
}

void Console::print(std::string_view text) {
    if (is_rank_zero_) terminal_.print(text, progress(done_ == total_ ? "" : last_step_));
}

void Console::doing(std::string_view what, double share) {
    if (!is_rank_zero_ || !terminal_.has_status() || is_quiet_) return;
    constexpr std::chrono::milliseconds often_enough{100};
    const auto now = std::chrono::steady_clock::now();
    if (share > 0 && now - shown_ < often_enough) return;
    shown_ = now;
    terminal_.print("", progress(fmt::format("{} {:.0f}%  ", what, std::floor(100 * share))));
}

void Console::print_rows(const Rows& rows) {
    std::size_t name_width = 0;
    for (const auto& [name, value] : rows) name_width = std::max(name_width, name.size());
    const auto columns = static_cast<std::size_t>(std::min(widest, terminal_.columns()));
    const std::size_t value_width = std::max<std::size_t>(40, columns - std::min(columns, name_width + 4));
    std::string text;
    for (const auto& [name, value] : rows) {
        std::string label = terminal_.styled(Style::faint, fmt::format("{:<{}}", name, name_width));
        for (const std::string& line : wrapped(value, value_width)) {
            text += fmt::format("  {}  {}\n", label, line);
            label = std::string(name_width, ' ');
        }
    }
    print(text);
}

void Console::settle(std::int64_t every, bool is_quiet) {
    every_ = every;
    is_quiet_ = is_quiet;
}

void Console::header(std::string_view title, const Rows& rows) {
    if (!is_rank_zero_ || is_quiet_) return;
    print(terminal_.styled(Style::heading, title) + "\n");
    print_rows(rows);
    print("\n");
}

void Console::begin(std::int64_t first, std::int64_t total) {
    first_ = first;
    done_ = first - 1;
    total_ = total;
    start_ = std::chrono::steady_clock::now();
    print("");
}

void Console::step(const StepMetrics& m) {
    if (!is_rank_zero_ || is_quiet_) return;
    done_ = m.step;
    last_step_ = fmt::format("loss {}  ", fitted(m.loss, 5, 9));
    if (m.step != first_ && m.step != total_ && m.step % every_ != 0) return print("");
    const auto width = static_cast<int>(std::max<std::size_t>(4, std::to_string(total_).size()));
    const bool knows_peak = m.model_flops_utilization.has_value();
    if (steps_since_heading_ % lines_per_heading == 0) {
        print(terminal_.styled(Style::heading, fmt::format("{:>{}}  {:>9}  {:>9}  {:>9}  {:>9}  {:>11}{}",
                                                           "step", width, "loss", "grad norm", "lr", "ms",
                                                           "tokens/s", knows_peak ? "     MFU" : "")) +
              "\n");
    }
    ++steps_since_heading_;
    const std::string line =
        fmt::format("{:>{}}  {:>9}  {:>9}  {:>9.3e}  {:>9}  {:>11}{}\n", m.step, width, fitted(m.loss, 5, 9),
                    m.grad_norm ? fitted(*m.grad_norm, 4, 9) : "skipped", m.learning_rate,
                    fitted(m.step_ms, 1, 9), grouped(static_cast<std::int64_t>(m.tokens_per_second)),
                    knows_peak ? fmt::format("  {:>5.1f}%", 100 * *m.model_flops_utilization) : "");
    print(line);
}

void Console::evaluation(const StepMetrics& metrics) {
    if (metrics.val_loss) validation(metrics.step, *metrics.val_loss);
    if (metrics.hellaswag) hellaswag(metrics.step, *metrics.hellaswag);
}

void Console::validation(std::int64_t step, double loss) {
    print(terminal_.styled(Style::result,
                           fmt::format("-- validation after step {}: loss {}", step, fitted(loss, 5, 15))) +
          "\n");
}

void Console::hellaswag(std::int64_t step, const HellaSwagScore& score) {
    print(terminal_.styled(
              Style::result,
              fmt::format("-- HellaSwag after step {}: {:.2f}% right by mean loss per token, {:.2f}% by "
                          "summed loss, of {}",
                          step, 100 * score.accuracy_norm, 100 * score.accuracy,
                          plural(score.examples, "example"))) +
          "\n");
}

void Console::checkpoint(std::int64_t step, std::string_view path) {
    if (!is_quiet_)
        print(terminal_.styled(Style::faint, fmt::format("-- checkpoint of step {}: {}", step, path)) + "\n");
}

void Console::sample(std::int64_t step, std::string_view text) {
    while (text.starts_with('\n')) text.remove_prefix(1);
    constexpr int columns = 72;
    print(
        fmt::format("\n{}\n{}\n{}\n",
                    terminal_.styled(Style::faint, rule(fmt::format("sample after step {}", step), columns)),
                    text, terminal_.styled(Style::faint, fmt::format("{:-<{}}", "", columns))));
    steps_since_heading_ = 0;
}

void Console::summary(const Rows& rows, const std::vector<Suggestion>& suggestions) {
    if (!is_rank_zero_ || rows.empty()) return;
    done_ = total_;
    last_step_.clear();
    print("\n");
    print_rows(rows);
    if (suggestions.empty()) return;
    std::string text = "\n";
    for (const auto& [purpose, command] : suggestions) text += fmt::format("{}\n  {}\n", purpose, command);
    print(text);
    command_ = suggestions.front().command;
}

void Console::note(std::string_view text) { print(fmt::format("note: {}\n", text)); }

void Console::text(std::string_view text) { print(text); }

void Console::chart(const Timeline& timeline, std::string_view title) {
    if (!is_rank_zero_) return;
    print(timeline_chart(timeline, title, terminal_.columns(), terminal_.has_colours()) + "\n");
}

std::string Console::what_was_lost() const {
    if (terminal_.failure() == 0) return "";
    return fmt::format(
        "cannot write to standard output: {}; the printed text is incomplete, but all files are complete{}",
        std::strerror(terminal_.failure()), command_.empty() ? "" : "; go on with: " + command_);
}

void Console::require_written() const {
    if (const std::string lost = what_was_lost(); !lost.empty()) throw UserError(lost);
}

}  // namespace llmc
