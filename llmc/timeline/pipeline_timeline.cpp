// Draws the chart for a terminal, and writes the trace.
#include "llmc/timeline/pipeline_timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

namespace llmc {

std::string to_string(const Bubble& bubble) {
    return fmt::format("{:.1f}% of all time, {:.1f}% of the useful time", 100 * bubble.over_total,
                       100 * bubble.over_useful);
}

namespace {

// ---- the chart

struct Shade {
    int foreground, background;  // numbers of the terminal's 256 colours
};
// The styles of a stage's chunks, in order; after the last the first follows. Letters change case with each
// chunk, fill characters change with every second chunk, and colours become lighter. Each colour has two
// shades, so that adjacent passes of a kind differ.
constexpr std::size_t looks_of_chunks = 8, coloured_chunks = 4;
struct Look {
    char letter;
    std::array<char, looks_of_chunks / 2> fillers;
    std::array<std::array<Shade, 2>, coloured_chunks> shades;
    std::string_view meaning;

    char letter_of(std::size_t chunk_of_stage) const {
        return static_cast<char>(chunk_of_stage % 2 == 0 ? letter : std::tolower(letter));
    }
    char filler_of(std::size_t chunk_of_stage) const {
        return fillers.at(chunk_of_stage % looks_of_chunks / 2);
    }
};

const Look& look_of(PassKind kind) {
    using Shades = std::array<std::array<Shade, 2>, coloured_chunks>;
    static constexpr Shades blue{{{{{231, 25}, {231, 32}}},
                                  {{{16, 67}, {16, 74}}},
                                  {{{16, 110}, {16, 117}}},
                                  {{{16, 153}, {16, 195}}}}},
        green{{{{{231, 28}, {16, 71}}},
               {{{16, 65}, {16, 108}}},
               {{{16, 107}, {16, 150}}},
               {{{16, 151}, {16, 194}}}}},
        orange{{{{{16, 172}, {16, 215}}},
                {{{16, 179}, {16, 222}}},
                {{{16, 180}, {16, 223}}},
                {{{16, 187}, {16, 230}}}}};
    static constexpr Look forward{'F', {'-', ':', '+', '\''}, blue, "forward"};
    static constexpr Look backward{'B', {'=', '#', '%', '"'}, green, "backward"};
    static constexpr Look input{'B', {'=', '#', '%', '"'}, green, "gradients of inputs"};
    static constexpr Look weight{'W', {'~', '^', '*', '_'}, orange, "gradients of weights"};
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

std::string coloured(const Look& look, std::size_t chunk_of_stage, std::size_t neighbour,
                     std::string_view text) {
    const Shade& shade = look.shades.at(chunk_of_stage % coloured_chunks).at(neighbour % 2);
    return fmt::format("\x1b[38;5;{};48;5;{}m{}\x1b[0m", shade.foreground, shade.background, text);
}

// A pass, drawn in `columns` columns.
std::string cell(const Span& span, std::size_t chunk_of_stage, std::size_t columns, bool colours,
                 std::size_t neighbour) {
    const Look& look = look_of(span.pass.kind);
    const char letter = look.letter_of(chunk_of_stage);
    std::string text = std::to_string(span.pass.micro_batch);
    if (!colours) text = letter + text;
    if (text.size() > columns) text = colours ? "" : std::string(1, letter);
    text.resize(columns, colours ? ' ' : look.filler_of(chunk_of_stage));
    return colours ? coloured(look, chunk_of_stage, neighbour, text) : text;
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
        const auto chunk_of_stage = static_cast<std::size_t>(span.pass.chunk / timeline.stages);
        row += cell(span, chunk_of_stage, end - first, colours, shade);
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

struct Entry {
    std::string text;
    std::size_t width;  // in visible characters
};
// Joins entries in lines of at most `columns` columns.
std::string in_lines(const std::vector<Entry>& entries, std::string_view gap, std::size_t columns) {
    std::string lines;
    std::size_t used = 0;
    for (const auto& [text, width] : entries) {
        const bool fits = used == 0 || used + gap.size() + width <= columns;
        if (used > 0) lines += fits ? gap : "\n";
        lines += text;
        used = fits && used > 0 ? used + gap.size() + width : width;
    }
    return lines;
}

// Explains the looks.
std::string legend_of(const Timeline& timeline, std::size_t columns, bool colours) {
    std::vector<Entry> entries;
    const auto explain = [&](const std::string& sample, std::size_t width, std::string_view meaning) {
        entries.push_back({fmt::format("{} {}", sample, meaning), width + 1 + meaning.size()});
    };
    const auto turns = std::min(static_cast<std::size_t>(timeline.virtual_stages),
                                colours ? coloured_chunks : looks_of_chunks);
    for (const PassKind kind : kinds_of(timeline)) {
        const Look& look = look_of(kind);
        std::string samples;
        std::size_t width = 0;
        for (std::size_t chunk_of_stage = 0; chunk_of_stage < turns; ++chunk_of_stage) {
            const std::string sample = colours ? " 0 "
                                               : fmt::format("{}0{}", look.letter_of(chunk_of_stage),
                                                             look.filler_of(chunk_of_stage));
            if (chunk_of_stage > 0 && !colours) samples += ' ';
            width += sample.size() + (chunk_of_stage > 0 && !colours ? 1 : 0);
            samples += colours ? coloured(look, chunk_of_stage, 0, sample) : sample;
        }
        explain(samples, width, look.meaning);
    }
    if (!colours) explain("...", 3, "idle");
    explain("0 1 2", 5, "micro-batches");
    if (turns > 1) entries.push_back({"chunks of a stage in their order", 32});
    return in_lines(entries, "   ", columns);
}

// "activations held at most, stage by stage: 4, 3, 2, 1 micro-batches".
std::string held_text(const Timeline& timeline, std::size_t columns) {
    std::vector<Entry> entries;
    const auto add = [&](const std::string& text) { entries.push_back({text, text.size()}); };
    add("activations held at most, stage by stage:");
    for (int stage = 0; stage < timeline.stages; ++stage) {
        add(fmt::format("{:.3g}{}", timeline.peak_in_flight(stage), stage + 1 < timeline.stages ? "," : ""));
    }
    add("micro-batches");
    return in_lines(entries, " ", columns);
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
    return chart + fmt::format("{}\nbubble: {}\n{}\n", legend_of(timeline, label + width, colours),
                               to_string(bubble(timeline)), held_text(timeline, label + width));
}

// ---- the trace

std::string timeline_trace(const Timeline& timeline, std::string_view title) {
    using nlohmann::ordered_json;
    constexpr double microseconds = 1e6;
    // Perfetto treats process and thread 0 as the idle system.
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
    const double begin = timeline.begin();  // begin() searches all passes, so it is called once
    for (const Span& span : timeline.spans) {
        const std::string_view kind = name_of(span.pass.kind);
        events.push_back({{"name", fmt::format("{} {}", kind, span.pass.micro_batch)},
                          {"cat", kind},
                          {"ph", "X"},
                          {"ts", (span.begin - begin) * microseconds},
                          {"dur", (span.end - span.begin) * microseconds},
                          {"pid", process},
                          {"tid", thread(span.stage)},
                          {"args", {{"micro_batch", span.pass.micro_batch}, {"chunk", span.pass.chunk}}}});
    }
    const Bubble found = bubble(timeline);
    ordered_json held = ordered_json::array();
    for (int stage = 0; stage < timeline.stages; ++stage) held.push_back(timeline.peak_in_flight(stage));
    // `second_is` says what a second of the picture stands for; in an estimate it is no second.
    const ordered_json trace = {{"traceEvents", std::move(events)},
                                {"displayTimeUnit", "ms"},
                                {"otherData",
                                 {{"title", title},
                                  {"second_is", timeline.unit.empty() ? "second" : timeline.unit},
                                  {"bubble_idle_over_total", found.over_total},
                                  {"bubble_idle_over_useful", found.over_useful},
                                  {"peak_micro_batches_in_flight", std::move(held)}}}};
    return trace.dump() + "\n";
}

}  // namespace llmc
