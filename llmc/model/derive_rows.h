// Makes a part's lists for generation: the forward pass of a few new tokens (rows) of one sequence, after the
// tokens whose keys and values are in a cache. They need no memory of their own: the cache lies where a
// training step keeps the keys and values. Each tensor-parallel rank computes all new rows, even if the ranks
// divide the tokens in a training step.
#pragma once

#include "llmc/model/place_calls.h"

namespace llmc {

// Needs a part whose forward pass has been drafted, and whose kept values have been placed.
void derive_rows(PartLists& lists, Drafting& draft, Placing& placing);

}  // namespace llmc
