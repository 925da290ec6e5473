#include "llmc/parallel/pipeline_timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

namespace llmc {

std::string to_string(const Bubble& bubble) {
    return fmt::format("{:.1f}% idle over total, {:.1f}% idle over useful", 100 * bubble.over_total,
                       100 * bubble.over_useful);
}

namespace {

// ---- the chart

struct Look {
    char letter, filler;
    // Two shades of the terminal's 256 colours, so that neighbours of a kind are told apart; of letters and of what is
    // behind them.
    std::array<int, 2> foreground, background;
    std::string_view meaning;
};

const Look& look_of(PassKind kind) {
    static constexpr Look forward{'F', '-', {231, 231}, {25, 32}, "forward"};
    static constexpr Look backward{'B', '=', {231, 16}, {28, 71}, "backward"};
    static constexpr Look input{'B', '=', {231, 16}, {28, 71}, "gradients of inputs"};
    static constexpr Look weight{'W', '~', {16, 16}, {172, 215}, "gradients of weights"};
    switch (kind) {
        case PassKind::forward:
            return forward;
        case PassKind::backward:
            return backward;
        case PassKind::backward_input:
            return input;
        case PassKind::backward_weight:
            break;
    }
    return weight;
}

std::string coloured(const Look& look, std::size_t shade, std::string_view text) {
    return fmt::format("\x1b[38;5;{};48;5;{}m{}\x1b[0m", look.foreground[shade % 2],
                       look.background[shade % 2], text);
}

// A pass in so many columns.
std::string cell(const Span& span, std::size_t columns, bool colours, std::size_t shade) {
    const Look& look = look_of(span.pass.kind);
    std::string text = std::to_string(span.pass.micro_batch);
    if (!colours) text = look.letter + text;
    if (text.size() > columns) text = colours ? "" : std::string(1, look.letter);
    text.resize(columns, colours ? ' ' : look.filler);
    return colours ? coloured(look, shade, text) : text;
}

std::string row_of(const Timeline& timeline, int stage, std::size_t columns, bool colours) {
    const double begin = timeline.begin(), total = timeline.total();
    const auto column_at = [&](double time) {
        const double place = total > 0 ? (time - begin) / total * static_cast<double>(columns) : 0;
        return static_cast<std::size_t>(std::lround(place));
    };
    std::string row;
    std::size_t at = 0;
    std::array<std::size_t, 4> shades{};
    for (const Span& span : timeline.spans) {
        if (span.stage != stage) continue;
        // Measured times may overlap by less than can be seen.
        const std::size_t first = std::max(at, column_at(span.begin)),
                          end = std::max(first, column_at(span.end));
        const std::size_t shade = shades.at(static_cast<std::size_t>(span.pass.kind))++;
        if (first == end) continue;
        row.append(first - at, colours ? ' ' : '.');
        row += cell(span, end - first, colours, shade);
        at = end;
    }
    if (!colours) row.append(columns - at, '.');
    return row;
}

std::vector<PassKind> kinds_of(const Timeline& timeline) {
    std::vector<PassKind> kinds;
    for (const PassKind kind :
         {PassKind::forward, PassKind::backward, PassKind::backward_input, PassKind::backward_weight}) {
        if (std::ranges::any_of(timeline.spans, [&](const Span& span) { return span.pass.kind == kind; }))
            kinds.push_back(kind);
    }
    return kinds;
}

// What the looks mean, in lines of at most so many columns.
std::string legend_of(const Timeline& timeline, std::size_t columns, bool colours) {
    struct Entry {
        std::string sample;
        std::size_t width;
        std::string_view meaning;
    };
    std::vector<Entry> entries;
    for (const PassKind kind : kinds_of(timeline)) {
        const Look& look = look_of(kind);
        const std::string sample = colours ? " 0 " : fmt::format("{}0{}", look.letter, look.filler);
        entries.push_back({colours ? coloured(look, 0, sample) : sample, sample.size(), look.meaning});
    }
    if (!colours) entries.push_back({"...", 3, "idle"});
    entries.push_back({"0 1 2", 5, "micro-batches"});
    constexpr std::string_view gap = "   ";
    std::string legend;
    std::size_t used = 0;
    for (const auto& [sample, width, meaning] : entries) {
        const std::size_t wanted = width + 1 + meaning.size();
        const bool fits = used == 0 || used + gap.size() + wanted <= columns;
        if (used > 0) legend += fits ? gap : "\n";
        legend += fmt::format("{} {}", sample, meaning);
        used = fits && used > 0 ? used + gap.size() + wanted : wanted;
    }
    return legend;
}

}  // namespace

std::string timeline_chart(const Timeline& timeline, std::string_view title, int columns, bool colours) {
    constexpr std::size_t fewest = 16;
    const std::size_t label = fmt::format("stage {} ", timeline.stages - 1).size();
    const auto given = static_cast<std::size_t>(std::max(columns, 0));
    const std::size_t width = given > label + fewest ? given - label : fewest;
    std::string chart = fmt::format("{}\n", title);
    for (int stage = 0; stage < timeline.stages; ++stage) {
        chart += fmt::format("{:<{}}{}\n", fmt::format("stage {}", stage), label,
                             row_of(timeline, stage, width, colours));
    }
    chart += fmt::format("{:{}}0{:>{}}\n", "", label, timeline.text_of(timeline.total()), width - 1);
    return chart + fmt::format("{}\nbubble: {}\n", legend_of(timeline, label + width, colours),
                               to_string(bubble(timeline)));
}

// ---- the trace

std::string timeline_trace(const Timeline& timeline, std::string_view title) {
    using nlohmann::ordered_json;
    constexpr double microseconds = 1e6;
    // Process and thread 0 are the idle system's to Perfetto.
    constexpr int process = 1;
    const auto thread = [](int stage) { return stage + 1; };
    ordered_json events = ordered_json::array();
    const auto describe = [&](std::string_view what, int stage, ordered_json args) {
        events.push_back({{"name", what},
                          {"ph", "M"},
                          {"pid", process},
                          {"tid", thread(stage)},
                          {"args", std::move(args)}});
    };
    describe("process_name", 0, {{"name", title}});
    for (int stage = 0; stage < timeline.stages; ++stage) {
        describe("thread_name", stage, {{"name", fmt::format("stage {}", stage)}});
        describe("thread_sort_index", stage, {{"sort_index", stage}});
    }
    for (const Span& span : timeline.spans) {
        const std::string_view kind = name_of(span.pass.kind);
        events.push_back({{"name", fmt::format("{} {}", kind, span.pass.micro_batch)},
                          {"cat", kind},
                          {"ph", "X"},
                          {"ts", (span.begin - timeline.begin()) * microseconds},
                          {"dur", (span.end - span.begin) * microseconds},
                          {"pid", process},
                          {"tid", thread(span.stage)},
                          {"args", {{"micro_batch", span.pass.micro_batch}, {"chunk", span.pass.chunk}}}});
    }
    const Bubble found = bubble(timeline);
    const ordered_json trace = {{"traceEvents", std::move(events)},
                                {"displayTimeUnit", "ms"},
                                {"otherData",
                                 {{"title", title},
                                  {"second_is", timeline.unit.empty() ? "second" : timeline.unit},
                                  {"bubble_idle_over_total", found.over_total},
                                  {"bubble_idle_over_useful", found.over_useful}}}};
    return trace.dump() + "\n";
}

}  // namespace llmc
