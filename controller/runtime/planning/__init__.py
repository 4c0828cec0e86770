"""The planner, running: it reads the state store, decides, says so, and has it carried out."""
