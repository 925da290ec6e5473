// Prints a list for a person: --print-step, and the names of actions in errors.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "llmc/core/text.h"
#include "llmc/parallel/step/step.h"

namespace llmc {

namespace {

std::string_view name_of(BufferRole role) {
    return name_among(role, "parameters", "parameter shard", "gradients", "gradient shard", "sums",
                      "optimizer", "tokens", "input", "residual", "saved", "recomputed", "doutputs",
                      "dresidual", "rows", "logits", "loss", "squares", "norm", "amax", "directions",
                      "piece in buffer");
}

// Stands before the number of a buffer that micro-batches use in turn. It is not printed.
constexpr char turn_mark = '\x1f';

// The buffers as text: "parameters h.2 (in h.0's place), tokens".
std::string to_string(std::span<const BufferUse> uses, const Outline& outline) {
    const auto unit_name = [&](int unit) -> const std::string& { return outline.unit(unit).spec.name; };
    std::string text;
    for (std::size_t i = 0; i < uses.size(); ++i) {
        const BufferUse& use = uses[i];
        if (i > 0) text += ", ";
        text += name_of(use.role);
        if (use.tier == Tier::disk) text += " on disk of";
        if (use.tier == Tier::host) text += use.role == BufferRole::state_piece ? "" : " on host of";
        if (use.role == BufferRole::recomputed) {
            text += " " + unit_name(outline.part(use.unit).own_unit);
        } else if (belongs_to_unit(use.role)) {
            text += " " + unit_name(use.unit);
            if (use.role != BufferRole::optimizer && use.role != BufferRole::directions &&
                use.index != use.unit)
                text += fmt::format(" (in {}'s place)", unit_name(use.index));
        }
        if (use.role == BufferRole::residual || use.role == BufferRole::saved ||
            use.role == BufferRole::output_gradients)
            text += fmt::format(" {}", use.index);
        if (use.role == BufferRole::state_piece) text += fmt::format("{} {}", turn_mark, use.index);
        if ((use.role == BufferRole::chunk_input || use.role == BufferRole::residual_gradient) &&
            use.index > 0)
            text += fmt::format("{} {}", turn_mark, use.index);
    }
    return text;
}

std::string counted(int n, std::string_view what) {
    return fmt::format("{} {}{}", n, what, n == 1 ? "" : "s");
}

// A line of the list, taken apart: its text with every number as `#`, and the numbers. The first `places`
// numbers are positions in the list: the line's own, and those of the actions that it waits for. The numbers
// of buffers that are used in turn are left out.
struct Line {
    std::string text, pattern;
    std::vector<std::int64_t> numbers;
    std::size_t places;
    std::string on;   // "block 3"
    int micro_batch;  // that of the action, or of the next one that has one
};

Line parse_line(std::string_view text, std::size_t places, std::string on, int micro_batch) {
    Line line{{}, {}, {}, places, std::move(on), micro_batch};
    while (!text.empty()) {
        const bool is_in_turn = text.front() == turn_mark;
        if (is_in_turn) {
            text.remove_prefix(1);
            line.text += ' ';
            text.remove_prefix(1);
        }
        const std::size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
        const std::string_view piece = text.substr(0, std::max<std::size_t>(digits, 1));
        line.text += piece;
        text.remove_prefix(piece.size());
        // Columns may be wider where numbers have more digits.
        const bool is_filling = piece == " " && text.starts_with(' ');
        if (is_in_turn || is_filling) continue;
        line.pattern += digits > 0 ? "#" : piece;
        if (digits > 0) line.numbers.push_back(std::stoll(std::string(piece)));
    }
    return line;
}

using Lines = std::span<const Line>;

// Whether lines [at + period, at + 2 period) repeat lines [at, at + period) for later layers or micro-batches.
// Their numbers may all differ by the same number. Places in the list may differ by the period or, with
// `first`, by as much as from lines [first, first + period) to the lines after these. (The update of each layer
// waits for an earlier action than that of the layer before.)
bool repeats(Lines lines, std::size_t at, std::size_t period,
             std::optional<std::size_t> first = std::nullopt) {
    if (at + 2 * period > lines.size()) return false;
    std::int64_t shift = 0;
    for (std::size_t i = 0; i < period; ++i) {
        const Line &line = lines[at + i], &next = lines[at + period + i];
        if (line.pattern != next.pattern || line.places != next.places) return false;
        for (std::size_t k = 0; k < line.numbers.size(); ++k) {
            const std::int64_t difference = next.numbers[k] - line.numbers[k];
            if (difference == 0) continue;
            if (k < line.places) {
                const bool differs_as_before = first && difference == lines[*first + period + i].numbers[k] -
                                                                          lines[*first + i].numbers[k];
                if (!differs_as_before && difference != static_cast<std::int64_t>(period)) return false;
                continue;
            }
            if (shift != 0 && difference != shift) return false;
            shift = difference;
        }
    }
    return shift != 0;
}

// How often lines [at, at + period) are repeated after themselves.
std::size_t repetitions(Lines lines, std::size_t at, std::size_t period) {
    std::size_t count = 0;
    while (repeats(lines, at + count * period, period, at)) ++count;
    // One repetition does not show by how much places usually differ.
    return count > 1 || repeats(lines, at, period) ? count : 0;
}

// The numbers of lines that may repeat from a line on.
std::vector<std::size_t> periods_to_try(Lines lines, std::size_t at) {
    constexpr std::size_t longest = 192;   // some layers that take turns
    constexpr std::size_t rotations = 16;  // micro-batches whose buffers take turns
    std::vector<std::size_t> periods;
    for (std::size_t p = 1; p <= longest; ++p) periods.push_back(p);
    // A later micro-batch begins with the same action of the same layer.
    std::size_t found = 0;
    for (std::size_t i = at + 1; at + 2 * (i - at) <= lines.size() && found < rotations; ++i) {
        if (lines[i].on != lines[at].on || lines[i].pattern != lines[at].pattern) continue;
        ++found;
        if (i - at > longest) periods.push_back(i - at);
    }
    return periods;
}

// The layers of `count` repetitions of lines [at, at + period): "block 3 to block 11".
std::string names_of_repeated(Lines lines, std::size_t at, std::size_t period, std::size_t count) {
    std::vector<std::string> names;  // layers, or units if no action is on a layer
    for (const bool counts_units : {false, true}) {
        for (std::size_t i = at + period; i < at + (count + 1) * period; ++i) {
            const bool is_layer = lines[i].on.starts_with("block ");
            if (lines[i].on != lines[i - period].on && (is_layer || counts_units))
                names.push_back(lines[i].on);
        }
        if (!names.empty()) break;
    }
    if (names.empty()) return "later micro-batches";
    return names.front() == names.back() ? names.front()
                                         : fmt::format("{} to {}", names.front(), names.back());
}

// Whether a line is the first one of a micro-batch.
bool begins_micro_batch(Lines lines, std::size_t at) {
    return at > 0 && lines[at - 1].micro_batch != lines[at].micro_batch;
}

// The line to begin with, if lines repeat from `at` on. Lines that repeat for later micro-batches begin with the
// first one of a micro-batch, if they repeat as often from there.
std::size_t start_of_repeated(Lines lines, std::size_t at, std::size_t period, std::size_t count) {
    const bool in_one_micro_batch = lines[at].micro_batch == lines[at + period].micro_batch;
    if (in_one_micro_batch || begins_micro_batch(lines, at)) return at;
    for (std::size_t i = at + 1; i < at + period; ++i)
        if (begins_micro_batch(lines, i) && repetitions(lines, i, period) >= count) return i;
    return at;
}

// Prints lines that repeat for consecutive layers or micro-batches only once. `begin` is the place of the first
// line in the whole list.
std::string without_repetitions(Lines lines, std::size_t begin) {
    std::string text;
    for (std::size_t i = 0; i < lines.size();) {
        std::size_t period = 0, count = 0;
        for (const std::size_t p : periods_to_try(lines, i)) {
            const std::size_t repeated = repetitions(lines, i, p);
            if (repeated * p > period * count) period = p, count = repeated;
        }
        if (count * period < 2) {
            text += lines[i++].text;
            continue;
        }
        if (const std::size_t start = start_of_repeated(lines, i, period, count); start > i) {
            text += without_repetitions(lines.subspan(i, start - i), begin + i);
            i = start;
            continue;
        }
        text += without_repetitions(lines.subspan(i, period), begin + i);
        text += fmt::format("{:>5}  the same for {} (actions {} to {})\n", "...",
                            names_of_repeated(lines, i, period, count), begin + i + period,
                            begin + i + (count + 1) * period - 1);
        i += (count + 1) * period;
    }
    return text;
}

}  // namespace

std::string to_string(const Step& step, bool is_whole) {
    const Outline& outline = *step.part.outline;
    std::string sharding = step.sharding.description();
    if (!sharding.empty()) sharding.insert(0, ", ");
    std::string tensor;
    if (step.tensor.ranks > 1) {
        tensor = fmt::format(", {}{}", counted(step.tensor.ranks, "tensor rank"),
                             step.tensor.sequence_parallel ? " with sequence parallelism" : "");
    }
    std::string recompute;
    if (step.part.recomputes_any(step.recompute)) {
        recompute = fmt::format(", recompute {}", name_of(step.recompute.kind));
        if (step.recompute.every > 1) recompute += fmt::format(" of 1 block in {}", step.recompute.every);
    }
    std::string text = fmt::format(
        "one step of this rank: {} actions, {}{}, {}{}{}{}\n\n", step.actions.size(),
        step.stages == 1 ? "" : fmt::format("stage {} of {}, ", step.stage, step.stages),
        step.micro_batches == 1 ? "1 micro-batch" : fmt::format("{} micro-batches", step.micro_batches),
        counted(step.sharding.ranks(), "data rank"), tensor, sharding, recompute);
    text += fmt::format("{:>5}  {:>5}  {:<14} {:<17} {:<10} {:>5}  {}\n", "#", "after", "stream", "action",
                        "on", "micro", "reads -> writes");
    std::vector<Line> lines;
    for (std::size_t i = 0; i < step.actions.size(); ++i) {
        const Action& action = step.actions[i];
        const std::string on =
            action.part >= 0                 ? outline.part(action.part).name
            : is_between_stages(action.kind) ? fmt::format("chunk {}", step.chunk_of(action).number)
            : action.piece >= 0 ? fmt::format("{}/{}", outline.unit(action.unit).spec.name, action.piece)
            : action.unit >= 0  ? outline.unit(action.unit).spec.name
                                : "";
        const std::string micro = action.micro_batch >= 0 ? std::to_string(action.micro_batch) : "";
        const std::string after = fmt::format("{}", fmt::join(action.after, ","));
        const std::string line = fmt::format(
            "{:>5}  {:>5}  {:<14} {:<17} {:<10} {:>5}  {}{}{}\n", i, after, name_of(action.stream),
            name_of(action.kind), on, micro, to_string(action.reads, outline),
            action.reads.empty() ? "-> " : " -> ", to_string(action.writes, outline));
        lines.push_back(parse_line(line, 1 + action.after.size(), on, action.micro_batch));
        if (is_whole) text += lines.back().text;
    }
    for (std::size_t i = lines.size(); i > 1; --i)
        if (lines[i - 2].micro_batch < 0) lines[i - 2].micro_batch = lines[i - 1].micro_batch;
    return is_whole ? text : text + without_repetitions(lines, 0);
}

}  // namespace llmc
