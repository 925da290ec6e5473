// Finds the first and the last part that add to a unit's gradients, within each backward pass and within the
// step. A round is one backward pass's addition to a unit's gradients.
#pragma once

#include <map>
#include <span>
#include <utility>
#include <vector>

#include "llmc/parallel/step/build_step.h"
#include "llmc/parallel/zero/unit_actions.h"

namespace llmc {

class GradientRounds {
  public:
    GradientRounds() = default;
    // `passes` are those of a stage, in their order.
    GradientRounds(const StepSpec& spec, std::span<const Pass> passes);

    // A pass by its position among these, its kind, and its chunk among the stage's.
    struct PassPlace {
        int number;
        PassKind kind;
        int chunk;
    };
    using Units = std::vector<std::pair<int, UnitActions::Round>>;
    // The units whose gradients a pass begins to compute at this part, or finishes at this part.
    Units begun_by(const PassPlace& pass, int part) const {
        return units_at(pass, part, &FirstLast::first_part);
    }
    Units ended_by(const PassPlace& pass, int part) const {
        return units_at(pass, part, &FirstLast::last_part);
    }

  private:
    using ChunkOfPass = std::pair<PassKind, int>;
    // For one unit: the first and the last pass that compute its gradients, and the first and the last such
    // part of each pass.
    struct FirstLast {
        int first, last;
        std::map<ChunkOfPass, int> first_part{}, last_part{};
    };
    Units units_at(const PassPlace& pass, int part, std::map<ChunkOfPass, int> FirstLast::*parts) const;

    const Outline* outline_ = nullptr;
    std::map<int, FirstLast> first_last_;
};

}  // namespace llmc
