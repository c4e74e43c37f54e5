// SPDX-License-Identifier: GPL-2.0
/* Commands as vectors: the entries of an interface's page, and their outcomes. */

#include <linux/mm.h>

#include "exmap/exmap.h"
#include "exmap/transfer.h"

/* Reads each entry of the vector once, as the process may go on writing it. */
static void exmap_read_vector(struct exmap *exmap, struct exmap_interface *interface,
			      unsigned int entries)
{
	unsigned int i;

	for (i = 0; i < entries; i++)
		interface->ranges[i] = exmap_decode(exmap, READ_ONCE(interface->vector[i]));
}

static long exmap_write_results(struct exmap_interface *interface, unsigned int entries)
{
	unsigned int i;
	long failed = 0;

	for (i = 0; i < entries; i++)
		WRITE_ONCE(interface->vector[i],
			   exmap_encode(interface, interface->ranges[i], interface->results[i],
					&failed));
	return failed;
}

static noinline long exmap_vector_transfer(struct exmap *exmap, unsigned int index,
					   unsigned int entries, bool write)
{
	struct exmap_interface *interface = &exmap->interface[index];
	struct exmap_transfer_batch *batch;

	if (!exmap_transfer_is_possible(exmap, write))
		return -EBADF;
	batch = exmap_transfer_get_batch(interface);
	if (!batch)
		return -ENOMEM;
	exmap_read_vector(exmap, interface, entries);
	exmap_transfer_plan(batch, exmap, index, write ? TRANSFER_WRITE : TRANSFER_FILL,
			    interface->ranges, interface->results, entries);
	return exmap_transfer_finish(batch) ?: exmap_write_results(interface, entries);
}

/*
 * Carries out the interface's vector, which may have come by the published interface. Returns the
 * number of entries with an error.
 */
long exmap_vector(struct exmap *exmap, unsigned int command, unsigned int index,
		  unsigned int entries, bool published)
{
	struct exmap_interface *interface = exmap_find_interface(exmap, index);
	long outcome;

	if (IS_ERR(interface))
		return PTR_ERR(interface);
	if (entries > VELLUM_EXMAP_VECTOR_ENTRIES)
		return -EINVAL;
	outcome = exmap_lock_interface(exmap, interface, true);
	if (outcome)
		return outcome;
	interface->published = published;
	switch (command) {
	case VELLUM_EXMAP_ALLOC:
		outcome = exmap_alloc_vector(exmap, index, entries);
		break;
	case VELLUM_EXMAP_FREE:
		outcome = exmap_free_vector(exmap, index, entries);
		break;
	case VELLUM_EXMAP_READ:
	case VELLUM_EXMAP_WRITE:
		outcome = exmap_vector_transfer(exmap, index, entries,
						command == VELLUM_EXMAP_WRITE);
		break;
	default:
		outcome = -EINVAL;
	}
	mutex_unlock(&interface->lock);
	return outcome;
}
