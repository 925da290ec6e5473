// Goes once through a stage's passes and notes for each unit which passes and parts add to its gradients.
#include "llmc/parallel/zero/gradient_rounds.h"

#include <algorithm>

namespace llmc {

namespace {

// Whether a pass computes the gradients of a part's parameters.
bool makes_gradients(PassKind pass, bool splits_backward) {
    return pass == PassKind::backward || (pass == PassKind::backward_weight && splits_backward) ||
           (pass == PassKind::backward_input && !splits_backward);
}

}  // namespace

GradientRounds::GradientRounds(const StepSpec& spec, std::span<const Pass> passes)
    : outline_(spec.part.outline.get()) {
    std::map<ChunkOfPass, std::pair<int, int>> spans;  // the first and the last pass of a kind and chunk
    for (int i = 0; i < std::ssize(passes); ++i) {
        const Pass& pass = passes[static_cast<std::size_t>(i)];
        spans.try_emplace({pass.kind, pass.chunk / spec.pipeline.stages}, i, i).first->second.second = i;
    }
    for (const auto& [key, span] : spans) {
        const Chunk& chunk = spec.part.chunks[static_cast<std::size_t>(key.second)];
        for (int part = chunk.end_part - 1; part >= chunk.first_part; --part) {
            if (!makes_gradients(key.first, splits_backward(*outline_, part, spec.recompute))) continue;
            for (const int unit : outline_->part(part).units) {
                FirstLast& ends =
                    first_last_.try_emplace(unit, FirstLast{span.first, span.second}).first->second;
                ends.first = std::min(ends.first, span.first);
                ends.last = std::max(ends.last, span.second);
                ends.first_part.try_emplace(key, part);
                ends.last_part[key] = part;
            }
        }
    }
}

GradientRounds::Units GradientRounds::units_at(const PassPlace& pass, int part,
                                               std::map<ChunkOfPass, int> FirstLast::*parts) const {
    std::vector<int> units = outline_->part(part).units;
    std::ranges::sort(units);
    if (parts == &FirstLast::last_part) std::ranges::reverse(units);
    Units found;
    for (const int unit : units) {
        const FirstLast& ends = first_last_.at(unit);
        if ((ends.*parts).at({pass.kind, pass.chunk}) == part)
            found.push_back({unit, {ends.first == pass.number, ends.last == pass.number}});
    }
    return found;
}

}  // namespace llmc
