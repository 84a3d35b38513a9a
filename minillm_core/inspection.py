"""Inspection of plans, plugins, modules, kernels and optimizers, for tools of other distributions.

The contract kit (minillm-kit) uses only :mod:`minillm_core`, :mod:`minillm_core.commands` and this module;
other checkers, profilers and backends can do the same. Names are imported on first use: looking up plugins
imports neither numpy nor a framework.

Plugins, installed or in a file
    :func:`find_plugin` imports a plugin, ``with_options`` sets its options for a plan; ``installed_plugins``
    and ``read_class`` read metadata and source without imports. ``check_support`` and ``unmet`` report why a
    plugin cannot run here, ``own_frames`` returns the frames of an error in its own code, and
    ``attribute_errors`` turns an exception raised by that code into a ``PluginCodeError``. ``bad_name`` and
    ``local_package`` are for tools that create new plugins.

Settings as typed
    ``from_assignments`` parses ``key=value``, ``check_option`` refuses values invalid for any option, and
    ``read_value`` parses the text after ``=``.

This machine and its distributions
    ``probe`` detects frameworks and devices without importing them (a ``Machine`` with an
    ``InstalledFramework`` each); ``choose`` and ``default_preset`` select backend and preset as a run does,
    ``DEVICES`` holds the backends, ``memory`` returns the bytes that this process may use, ``memory_limit``
    the container's limit. ``entry_points`` of the group ``GROUP`` and ``unreadable`` read metadata;
    ``version_mix`` compares the first-party ``DISTRIBUTIONS`` with the ``CORE``, and ``FRAMEWORKS`` are the
    packages that a pip line keeps at their versions.

A plan, step by step
    :func:`trainer` runs steps on given batches; :func:`batch_hook`, ``observers`` and ``Evidence`` are the
    other parts of the training loop. A ``Loader`` (dataloader) builds the batches, a ``StepBatch`` per step,
    from ``Documents`` in the plan's ``arrangement``. :class:`minillm_core.Run` is the whole loop.

A framework of your own, such as the NumPy oracle of minillm-kit
    It extends ``Framework``: ``ops`` (a subclass of ``OpsBase``; ``CONTRACTS`` specifies each op,
    :func:`visible_keys` computes the attention mask), ``placing``, ``fill``, ``host``, ``checkpoint`` and
    ``witness``, over a base class whose ``__setattr__`` calls ``record``. ``materialise`` builds a plan's
    model on it, ``materialising`` any module; ``declared`` yields the declarations of its modules,
    ``initial_values`` their initial values, ``generator`` is the random generator of one parameter, and
    ``call_names`` returns the arguments of a ``forward``. ``Scope`` is a decoder's view of the sequence; a
    batch with the entry ``COLUMNS`` holds some columns of its rows, and its shifted labels under the names of
    ``ahead``. ``decoder`` outlines a plan's model outside any framework, ``named_modules`` walks it,
    ``inputs_of`` lists the inputs of a resolved part, and a ``Loss`` is the model's result for a micro-batch,
    for selected positions if the batch has the entry ``GATHERED``. ``warmed`` lists the variants that a
    trainer compiles before its first step. A ``Deferred`` is an array read or drawn on demand.

The update
    ``Group`` and ``Member`` are the parameter groups that a rule updates together, ``groups_of`` creates
    them; ``update`` runs one step of the stages on any backend's ops, ``joined`` and ``apart`` stack the
    arrays of a group and unstack them.
"""

from minillm_core.public import public_names

__getattr__, __dir__ = public_names(__name__, __file__)
