// Divides a model's parts and units among pipeline stages.
#include "llmc/parallel/pipeline/stage.h"

#include <algorithm>
#include <set>
#include <utility>

#include "llmc/core/error.h"

namespace llmc {

int StagePart::most_places_of_a_chunk() const {
    int most = 0;
    for (const Chunk& chunk : chunks)
        most = std::max(most, chunk.end_part - chunk.first_with_input() - (chunk.makes_losses ? 1 : 0));
    return most;
}

bool StagePart::recomputes_any(const Recompute& recompute) const {
    for (const Chunk& chunk : chunks) {
        for (int layer = chunk.first_layer; layer < chunk.end_layer; ++layer) {
            if (recompute.recomputes(layer)) return true;
        }
    }
    return false;
}

RecomputeKind recompute_of(const Outline& outline, const Recompute& recompute, int part) {
    const Outline::OutlinedPart& of = outline.part_with_output(part);
    const int beyond = std::max(0, part - static_cast<int>(outline.parts.size()) + 2);
    return of.is_layer() ? recompute.of(of.layer + beyond) : RecomputeKind::none;
}

bool splits_backward(const Outline& outline, int part, const Recompute& recompute) {
    const Outline::OutlinedPart& of = outline.part(part);
    return outline.kind_of(of).splits_backward && !(of.is_layer() && recompute.recomputes(of.layer));
}

bool is_read_backward(const Outline& outline, int unit, int first_part, int end_part) {
    return std::ranges::any_of(outline.users(unit, first_part, end_part),
                               [&](int part) { return outline.kind_of(part).backward_reads_parameters; });
}

bool is_read_again(const Outline& outline, const Chunk& chunk, int part, int unit) {
    return outline.uses(unit, part + 1, chunk.end_part) ||
           is_read_backward(outline, unit, chunk.first_part, part + 1);
}

StagePart whole_model(const std::shared_ptr<const Outline>& outline) {
    const auto layers = static_cast<int>(outline->layers.size());
    return parts_of_stages(outline, {{0, layers}}, 1, false, {}).front();
}

std::vector<StagePart> parts_of_stages(const std::shared_ptr<const Outline>& outline,
                                       const std::vector<BlockRange>& chunks, int stages, bool splits,
                                       const Recompute& recompute) {
    const auto count = static_cast<int>(chunks.size());
    std::vector<StagePart> parts(static_cast<std::size_t>(stages), {.outline = outline, .chunks = {}});
    for (int number = 0; number < count; ++number) {
        const BlockRange& layers = chunks[static_cast<std::size_t>(number)];
        const bool is_first = number == 0, is_last = number + 1 == count;
        // A part that is no layer belongs to the layer before it. Those before the first layer belong to the
        // first chunk, and those behind the last layer to the last one.
        const auto part_of = [&](int layer) {
            const bool is_behind = layer == static_cast<int>(outline->layers.size());
            return is_behind ? outline->layers.back() + 1 : outline->layers[static_cast<std::size_t>(layer)];
        };
        const Chunk chunk{.number = number,
                          .first_part = is_first ? 0 : part_of(layers.first),
                          .end_part = is_last ? static_cast<int>(outline->parts.size()) : part_of(layers.end),
                          .first_layer = layers.first,
                          .end_layer = layers.end,
                          .takes_tokens = is_first,
                          .makes_losses = is_last};
        StagePart& stage = parts[static_cast<std::size_t>(number % stages)];
        stage.chunks.push_back(chunk);
        std::set<std::pair<int, bool>> rounds;
        for (int part = chunk.first_part; part < chunk.end_part; ++part) {
            const bool is_split = splits && splits_backward(*outline, part, recompute);
            for (const int unit : outline->part(part).units) rounds.insert({unit, is_split});
        }
        for (const auto& [unit, _] : rounds)
            stage.units[unit].rounds += outline->unit(unit).spec.is_frozen() ? 0 : 1;
    }
    std::vector<int> having(outline->units.size());  // the stages of each unit
    for (StagePart& part : parts) {
        for (auto& [unit, own] : part.units)
            own.counts = own.rounds > 0 && having[static_cast<std::size_t>(unit)]++ == 0;
    }
    for (StagePart& part : parts) {
        for (auto& [unit, own] : part.units) {
            own.stages = having[static_cast<std::size_t>(unit)];
            const int own_class = outline->unit(unit).class_of_layers;
            if (own_class < 0) continue;
            own.turn = static_cast<int>(part.alike[own_class].size());
            part.alike[own_class].push_back(unit);
        }
    }
    return parts;
}

}  // namespace llmc
