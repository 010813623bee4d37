"""The contracts: values, plug-in interfaces, the step kernel and the runner. Imports nothing of the rest."""
