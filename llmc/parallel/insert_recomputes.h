// Where blocks do not keep all activations: puts the actions that make them again into a list that says where they are
// computed and used.
#pragma once

#include "llmc/parallel/step.h"

namespace llmc {

// Before what a block did not keep is read, it is recomputed, unless nobody has overwritten it since: so it is for the last
// block of a model that goes from its forward pass straight to the backward pass.
void insert_recomputes(Step& step);

}  // namespace llmc
