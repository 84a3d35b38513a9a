"""Looks inside plans, plugins, modules, kernels and optimizers, for tools of other distributions.

The contract kit (minillm-kit) is written with :mod:`minillm_core`, :mod:`minillm_core.commands` and
this module, and with nothing beneath them; so can other checkers, profilers and backends be. Names
are imported when they are first used: the plugin look-up brings neither numpy nor a framework in.

Plugins, installed or in a file
    :func:`find_plugin` imports one, ``with_options`` makes it ready for a plan; ``installed_plugins``
    and ``read_class`` read metadata and source, and import nothing. ``check_support`` and ``unmet``
    say why a plugin cannot run here, ``own_frames`` which frames of an error are its own code, and
    ``PluginCodeError`` is raised where that code raised. ``bad_name`` and ``local_package`` serve
    those who write new plugins.

Settings as they are typed
    ``from_assignments`` parses ``key=value``, ``check_option`` refuses what no option can be, and
    ``read_value`` reads the text behind ``=``.

This machine and its distributions
    ``probe`` looks for frameworks and devices (a ``Machine`` with an ``InstalledFramework`` each) and imports
    none; ``choose`` and ``default_preset`` are a run's decisions there, ``DEVICES`` the backends that
    there are, ``memory`` the bytes that this process may use,
    ``memory_limit`` the container's. ``entry_points`` of the group ``GROUP`` and
    ``unreadable`` read metadata; ``version_mix`` compares our ``DISTRIBUTIONS`` with the ``CORE``, and
    ``FRAMEWORKS`` are packages that a pip line keeps as they are.

A plan, step by step
    :func:`trainer` runs steps on batches given by hand; :func:`batch_hook`, ``observers`` and
    ``Evidence`` are the rest of what the loop does. A ``Loader`` makes the batches (each step's a
    ``StepBatch``) from ``Documents``, as the plan's ``arrangement`` says. :class:`minillm_core.Run`
    is the whole loop.

A framework of your own, such as the NumPy oracle of minillm-kit
    It extends ``Framework``: ``ops`` (of a class that extends ``OpsBase``; ``CONTRACTS`` says what
    each op promises, :func:`visible_keys` is the mask of attention), ``placing``, ``fill``, ``host``,
    ``checkpoint`` and ``witness``, over a base class whose ``__setattr__`` calls ``record``.
    ``materialise`` makes a plan's model on it, ``materialising`` any module; ``declared`` yields what
    its modules declare, ``initial_values`` the first values of that, ``generator`` the random numbers
    of one parameter, and ``call_names`` the arguments of a ``forward``. ``Scope`` is how a decoder's
    modules see the sequence; a batch with the entry ``COLUMNS`` has some columns of its rows, and its
    labels further on by the names of ``ahead``. ``decoder`` outlines a plan's model outside any
    framework, ``named_modules`` walks it, ``inputs_of`` lists what a resolved part reads, and a ``Loss``
    is what the model returns of a micro-batch, of some positions alone where that has the entry ``GATHERED``.
    ``warmed`` lists what a trainer compiles before its first step. A ``Deferred`` is an array that is read
    or drawn when it is needed.

The update
    ``Group`` and ``Member`` say which parameters a rule updates together, ``groups_of`` makes them;
    ``update`` is one step of the stages on any backend's ops, ``joined`` and ``apart`` stack the
    arrays of a group and undo it.
"""

from minillm_core.public import public_names

__getattr__, __dir__ = public_names(__name__, __file__)
