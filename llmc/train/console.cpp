#include "llmc/train/console.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "llmc/core/text.h"

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

}  // namespace llmc
