// How the program's ranks come to be, and what each may use of its host.
#pragma once

#include <memory>

#include "comm/process_group.h"

namespace kdtree {

// The group of an MPI job where a launcher started one, a group of one otherwise. `single` asks for
// one rank whatever the environment says (--communicator self outside an MPI job).
std::unique_ptr<ProcessGroup> start_process_group(int* argc, char*** argv, bool single);

// Whether this process speaks for its job before MPI has told the ranks: the launcher's rank 0, or
// no launcher.
bool speaks_before_mpi();

// CPU threads for this rank unless the user says otherwise: OMP_NUM_THREADS where it is set, else
// the cores that the rank may run on, divided by the ranks of this host that may run on the same
// ones; at least 1. Collective.
int default_num_threads(ProcessGroup& group);

}  // namespace kdtree
