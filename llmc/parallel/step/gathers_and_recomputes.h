// Adds two kinds of actions to a list: the all-gathers of sharded parameters and the reads of those on a disk, and the
// recomputation of activations that blocks do not keep.
#pragma once

#include "llmc/parallel/step/step.h"

namespace llmc {

// Gathers sharded parameters before a part of the model reads them, and reads those on a disk before they are used or
// gathered. It does so Sharding::prefetch_units parts ahead, or as soon as their buffer is free.
void insert_gathers(Step& step);

// Recomputes what a part did not keep before its backward pass reads it. No recompute is added if nothing has
// overwritten it since the forward pass. An example is the model's last block, if its backward pass follows
// at once.
void insert_recomputes(Step& step);

}  // namespace llmc
