#include "comm/mpi/make_mpi_communicator.h"

#include "comm/mpi/mpi_call.h"
#include "comm/mpi/mpi_communicator.h"

namespace kdtree {

void require_mpi_job(const ProcessGroup& group) {
  int initialised = 0;
  check_mpi(MPI_Initialized(&initialised), "MPI_Initialized");
  require_input(initialised != 0,
                "--communicator mpi: this process was not started by mpirun or srun; use "
                "--communicator self or start it "
                "with `mpirun -n {}`",
                group.world_size());
  collective_time_limit();  // an InputError here is one that every rank knows of
}

std::unique_ptr<Communicator> make_mpi_communicator() {
  return std::make_unique<MpiCommunicator>();
}

}  // namespace kdtree
