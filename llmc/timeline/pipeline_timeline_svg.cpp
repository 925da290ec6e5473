// Draws a Timeline as an SVG picture (pipeline_timeline.h).
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "llmc/core/text.h"
#include "llmc/timeline/pipeline_timeline.h"

namespace llmc {

namespace {

// ---- sizes, in pixels
constexpr double left = 84, right = 140, top = 92, bottom = 76;
constexpr double row_height = 30, row_distance = 37;
constexpr double narrowest = 760, widest = 2600;  // limits of the axis's width
// Within these limits, the axis is so wide that an average pass has this width.
constexpr double typical_pass_width = 24;
constexpr double digit = 6.8;         // width of a digit at 11 pixels
constexpr double title_letter = 8.8;  // mean width of a letter of the title, at 17 pixels

// The colours of passes suit both backgrounds; all others change with it.
constexpr std::string_view style = R"(
text { font: 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", Helvetica, Arial, sans-serif; fill: #1c2430 }
.title { font-size: 17px; font-weight: 600 }
.faint { fill: #5b6675 }
.right { text-anchor: end }
.middle { text-anchor: middle }
.number { font-size: 11px; text-anchor: middle; pointer-events: none }
.on-dark { fill: #ffffff }
.on-light { fill: #10202f }
.background { fill: #ffffff }
.idle { fill: #e9edf2 }
.grid { stroke: #d3d9e1 }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e9f0 }
  .faint { fill: #9aa6b6 }
  .background { fill: #12161d }
  .idle { fill: #222a35 }
  .grid { stroke: #3a4556 }
}
)";

std::string escaped(std::string_view text) {
    std::string result;
    for (const char c : text) {
        if (c == '&')
            result += "&amp;";
        else if (c == '<')
            result += "&lt;";
        else if (c == '>')
            result += "&gt;";
        else
            result += c;
    }
    return result;
}

// ---- colours

using Colour = std::array<double, 3>;
struct Shades {
    Colour first, last;  // colours of a stage's first and last chunk
};

Shades shades_of(PassKind kind) {
    switch (kind) {
        case PassKind::forward:
            return {{31, 95, 180}, {160, 199, 243}};
        case PassKind::backward:
        case PassKind::backward_input:
            return {{22, 122, 88}, {146, 215, 184}};
        case PassKind::backward_weight:
            break;
    }
    return {{180, 93, 8}, {245, 196, 138}};
}

// How light a chunk is drawn, from 0 to 1.
double lightness_of(const Timeline& timeline, int chunk) {
    if (timeline.virtual_stages < 2) return 0;
    const int turn = chunk / timeline.stages;
    return static_cast<double>(turn) / (timeline.virtual_stages - 1);
}

std::string fill_of(PassKind kind, double lightness) {
    const auto [first, last] = shades_of(kind);
    const auto mixed = [&, first = first, last = last](std::size_t i) {
        return std::lround(first[i] + (last[i] - first[i]) * lightness);
    };
    return fmt::format("#{:02x}{:02x}{:02x}", mixed(0), mixed(1), mixed(2));
}

// ---- units of the axis

// The smallest of 1, 2, 5, 10, 20, ... that is not below `at_least`.
double round_number(double at_least) {
    const double decade = std::pow(10, std::floor(std::log10(at_least)));
    for (const double factor : {1.0, 2.0, 5.0}) {
        // Slightly less, since powers of ten are rounded.
        if (factor * decade >= at_least * (1 - 1e-9)) return factor * decade;
    }
    return 10 * decade;
}

struct Unit {
    double seconds;
    std::string_view name;
};

// The largest unit of which the axis has at least one.
Unit unit_of(double seconds) {
    for (const Unit unit : {Unit{1, "s"}, Unit{1e-3, "ms"}, Unit{1e-6, "us"}}) {
        if (seconds >= unit.seconds) return unit;
    }
    return {1e-9, "ns"};
}

class Picture {
  public:
    Picture(const Timeline& timeline, std::string_view title) : timeline_(timeline), title_(escaped(title)) {
        const auto passes = static_cast<double>(timeline.spans.size());
        double work = 0;
        for (int stage = 0; stage < timeline.stages; ++stage) work += timeline.work(stage);
        const double wanted = work > 0 ? total_ / (work / passes) * typical_pass_width : 0;
        const double title_width = 24 + static_cast<double>(title.size()) * title_letter - left;
        width_ = std::clamp(std::max(wanted, title_width), narrowest, widest);
        floor_ = top + timeline.stages * row_distance;
    }

    std::string draw() {
        const double full_width = left + width_ + right, full_height = floor_ + bottom;
        line(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 "
            "{0:.0f} "
            "{1:.0f}\" role=\"img\">",
            full_width, full_height);
        line("<title>{}</title>\n<style>{}</style>", title_, style);
        line("<rect class=\"background\" width=\"{:.0f}\" height=\"{:.0f}\"/>", full_width, full_height);
        text(24, 34, "title", title_);
        text(24, 56, "faint",
             fmt::format("bubble: {}; {} in all", to_string(bubble(timeline_)), timeline_.text_of(total_)));
        text(left + width_ + 62, top - 10, "faint right", "idle");
        text(left + width_ + 116, top - 10, "faint right", "held");
        for (int stage = 0; stage < timeline_.stages; ++stage) draw_track(stage);
        draw_axis();
        for (const Span& span : timeline_.spans) draw_pass(span);
        draw_legend();
        line("</svg>");
        return std::move(out_);
    }

  private:
    template <class... Args>
    void line(fmt::format_string<Args...> format, Args&&... args) {
        fmt::format_to(std::back_inserter(out_), format, std::forward<Args>(args)...);
        out_ += '\n';
    }
    void text(double x, double y, std::string_view kind, std::string_view words) {
        line("<text x=\"{:.1f}\" y=\"{:.1f}\" class=\"{}\">{}</text>", x, y, kind, words);
    }
    double x_at(double seconds) const { return left + (total_ > 0 ? seconds / total_ * width_ : 0); }
    static double y_of(int stage) { return top + stage * row_distance; }

    void draw_track(int stage) {
        const double y = y_of(stage), baseline = y + row_height / 2 + 4;
        line("<rect class=\"idle\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" rx=\"3\"/>",
             left, y, width_, row_height);
        text(left - 12, baseline, "right", fmt::format("stage {}", stage));
        const double share = total_ > 0 ? timeline_.idle(stage) / total_ : 0;
        text(left + width_ + 62, baseline, "right", fmt::format("{:.1f}%", 100 * share));
        line(
            "<text x=\"{:.1f}\" y=\"{:.1f}\" class=\"right\">{:.3g}<title>the most micro-batches whose "
            "activations "
            "stage {} holds</title></text>",
            left + width_ + 116, baseline, timeline_.peak_in_flight(stage), stage);
    }

    void draw_axis() {
        constexpr double mark_distance = 90;
        if (total_ <= 0) return;
        const double step = round_number(total_ * mark_distance / width_);
        const auto [unit, name] = unit_of(total_);
        for (int i = 0; i * step <= total_ * (1 + 1e-9); ++i) {
            const double x = x_at(i * step);
            line("<path class=\"grid\" d=\"M{0:.1f} {1:.1f}V{2:.1f}\"/>", x, top - 4, floor_ + 2);
            text(x, floor_ + 18, "faint middle", fmt::format("{:.6g} {}", i * step / unit, name));
        }
    }

    void draw_pass(const Span& span) {
        const double begin = span.begin - begin_, end = span.end - begin_;
        const double x = x_at(begin), full = x_at(end) - x, y = y_of(span.stage);
        // Wide passes leave one pixel of background between them.
        const double width = full > 3 ? full - 1 : full;
        const double lightness = lightness_of(timeline_, span.pass.chunk);
        line(
            "<rect x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.1f}\" rx=\"{}\" "
            "fill=\"{}\"><title>stage "
            "{}: {}; {} to {} ({})</title></rect>",
            x, y, width, row_height, full > 6 ? 2 : 0, fill_of(span.pass.kind, lightness), span.stage,
            to_string(span.pass), timeline_.text_of(begin), timeline_.text_of(end),
            timeline_.text_of(end - begin));
        const std::string number = std::to_string(span.pass.micro_batch);
        if (static_cast<double>(number.size()) * digit + 3 <= width)
            text(x + width / 2, y + row_height / 2 + 4,
                 lightness < 0.5 ? "number on-dark" : "number on-light", number);
    }

    void draw_legend() {
        constexpr double side = 14, letter = 6.5;
        constexpr int most_shades = 4;
        const double y = floor_ + bottom - 28;
        double x = left;
        const auto square = [&](std::string_view fill) {
            line("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{}\" height=\"{}\" rx=\"2\" {}/>", x, y, side, side,
                 fill);
            x += side + 1;
        };
        const auto say = [&](std::string_view words) {
            text(x + 6, y + 11.5, "faint", words);
            x += 32 + static_cast<double>(words.size()) * letter;
        };
        const auto explain = [&](PassKind kind, std::string_view words) {
            const int shades = std::min(timeline_.virtual_stages, most_shades);
            for (int i = 0; i < shades; ++i) {
                const double lightness = shades > 1 ? static_cast<double>(i) / (shades - 1) : 0;
                square(fmt::format("fill=\"{}\"", fill_of(kind, lightness)));
            }
            say(words);
        };
        const bool is_split = has(PassKind::backward_weight);
        explain(PassKind::forward, "forward");
        const bool has_whole = has(PassKind::backward);
        explain(PassKind::backward, !is_split   ? "backward"
                                    : has_whole ? "backward, or gradients of inputs"
                                                : "gradients of inputs");
        if (is_split) explain(PassKind::backward_weight, "gradients of weights");
        square("class=\"idle\"");
        say("idle");
        say(timeline_.virtual_stages > 1 ? "numbers are micro-batches; the later the chunk, the lighter"
                                         : "numbers are micro-batches");
    }

    bool has(PassKind kind) const {
        return std::ranges::any_of(timeline_.spans, [&](const Span& span) { return span.pass.kind == kind; });
    }

    const Timeline& timeline_;
    std::string title_;
    double begin_ = timeline_.begin(), total_ = timeline_.total();  // each searches all passes
    double width_ = 0, floor_ = 0;
    std::string out_;
};

}  // namespace

std::string timeline_svg(const Timeline& timeline, std::string_view title) {
    return Picture(timeline, title).draw();
}

}  // namespace llmc
