#include "llmc/train/console.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>

namespace llmc {

namespace {

// The heading of the step lines comes back this often, so that it is always on the screen.
constexpr std::int64_t lines_per_heading = 40;

void print(std::string_view text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
}

}  // namespace

void Console::header(std::string_view title,
                     const std::vector<std::pair<std::string, std::string>>& rows) const {
    if (!speaks_) return;
    std::string text = fmt::format("{}\n", title);
    std::size_t width = 0;
    for (const auto& [name, value] : rows) width = std::max(width, name.size());
    for (const auto& [name, value] : rows) text += fmt::format("  {:<{}}  {}\n", name, width, value);
    print(text + "\n");
}

void Console::step(const StepMetrics& m, std::int64_t total_steps) {
    if (!speaks_) return;
    const auto width = static_cast<int>(std::max<std::size_t>(4, std::to_string(total_steps).size()));
    if (steps_since_heading_ % lines_per_heading == 0) {
        print(fmt::format("{:>{}}  {:>9}  {:>9}  {:>9}  {:>8}  {:>9}\n", "step", 2 * width + 1, "loss",
                          "grad norm", "lr", "ms", "tokens/s"));
    }
    ++steps_since_heading_;
    print(fmt::format("{:>{}}/{}  {:>9.5f}  {:>9.4f}  {:>9.3e}  {:>8.1f}  {:>9}\n", m.step, width,
                      fmt::format("{:<{}}", total_steps, width), m.loss, m.grad_norm, m.learning_rate,
                      m.step_ms, grouped(static_cast<std::int64_t>(m.tokens_per_second))));
}

void Console::validation(std::int64_t step, double loss) {
    if (!speaks_) return;
    print(fmt::format("-- validation after step {}: loss {:.5f}\n", step, loss));
}

void Console::sample(std::int64_t step, std::string_view text) const {
    if (!speaks_) return;
    while (text.starts_with('\n')) text.remove_prefix(1);
    print(fmt::format("\n-- sample after step {} {:-<50}\n{}\n{:-<72}\n\n", step, "", text, ""));
}

void Console::note(std::string_view text) const {
    if (speaks_) print(fmt::format("note: {}\n", text));
}

void Console::text(std::string_view text) const {
    if (speaks_) print(text);
}

std::string human_bytes(std::size_t bytes) {
    constexpr std::array units = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    auto value = static_cast<double>(bytes);
    std::size_t unit = 0;
    for (; value >= 1024 && unit + 1 < units.size(); ++unit) value /= 1024;
    return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, units[unit]);
}

std::string grouped(std::int64_t number) {
    std::string text = std::to_string(number);
    for (auto place = static_cast<std::int64_t>(text.size()) - 3; place > (number < 0 ? 1 : 0); place -= 3) {
        text.insert(static_cast<std::size_t>(place), 1, ',');
    }
    return text;
}

std::string plural(std::int64_t count, std::string_view singular, std::string_view ending) {
    return fmt::format("{} {}{}", grouped(count), singular, count == 1 ? "" : ending);
}

}  // namespace llmc
