// Where the milliseconds of a step went.
#pragma once

#include <array>
#include <string_view>

#include "llmc/parallel/step.h"

namespace llmc {

// `communication` is the time for which computing stood still: communication beside it costs nothing here.
enum class Phase { data, forward, backward, communication, norm, update };
inline constexpr std::array all_phases = {Phase::data,          Phase::forward, Phase::backward,
                                          Phase::communication, Phase::norm,    Phase::update};
std::string_view name_of(Phase phase);
Phase phase_of(ActionKind kind);

// Milliseconds by phase.
class PhaseTimes {
  public:
    double& operator[](Phase phase) { return milliseconds_[static_cast<std::size_t>(phase)]; }
    double operator[](Phase phase) const { return milliseconds_[static_cast<std::size_t>(phase)]; }

  private:
    std::array<double, all_phases.size()> milliseconds_{};
};

}  // namespace llmc
