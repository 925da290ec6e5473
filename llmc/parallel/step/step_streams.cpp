// Names the phases of a step, and assigns each kind of action to one.
#include "llmc/parallel/step/step_streams.h"

#include <array>

#include "llmc/core/text.h"

namespace llmc {

std::string_view name_of(Phase phase) {
    return name_among(phase, "data", "forward", "backward", "communication", "norm", "update");
}

Phase phase_of(ActionKind kind) {
    using enum Phase;
    // In the order of ActionKind.
    constexpr std::array<Phase, 28> phases = {
        data,          communication, forward,       backward,      forward,       forward,
        backward,      backward,      backward,      backward,      communication, communication,
        communication, communication, forward,       backward,      backward,      communication,
        communication, backward,      communication, communication, communication, communication,
        norm,          communication, norm,          update};
    return phases.at(static_cast<std::size_t>(kind));
}

}  // namespace llmc
