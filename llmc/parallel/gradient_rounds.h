// When the gradients of units begin and end: which part of which backward pass is the first, and the last, to add to them.
#pragma once

#include <map>
#include <span>
#include <utility>
#include <vector>

#include "llmc/parallel/build_step.h"
#include "llmc/parallel/unit_actions.h"

namespace llmc {

class GradientRounds {
  public:
    GradientRounds() = default;
    // Of the passes of a stage, in their order.
    GradientRounds(const StepSpec& spec, std::span<const Pass> passes);

    // A pass by its place among these, its kind, and its chunk among the stage's.
    struct PassPlace {
        int number;
        PassKind kind;
        int chunk;
    };
    using Units = std::vector<std::pair<int, UnitActions::Round>>;
    // The units whose gradients a pass begins, or ends, to make with this part.
    Units begun_by(const PassPlace& pass, int part) const { return units_at(pass, part, &Of::first_part); }
    Units ended_by(const PassPlace& pass, int part) const { return units_at(pass, part, &Of::last_part); }

  private:
    using ChunkOfPass = std::pair<PassKind, int>;
    // Of a unit: the first and the last pass that makes its gradients, and of such passes the first and the last part.
    struct Of {
        int first, last;
        std::map<ChunkOfPass, int> first_part{}, last_part{};
    };
    Units units_at(const PassPlace& pass, int part, std::map<ChunkOfPass, int> Of::*parts) const;

    const Outline* outline_ = nullptr;
    std::map<int, Of> of_units_;
};

}  // namespace llmc
