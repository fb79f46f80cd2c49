"""Why a run is slow, stuck or dead: facts gathered from outside its processes, and what follows from them."""
