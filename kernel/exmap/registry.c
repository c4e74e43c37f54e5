// SPDX-License-Identifier: GPL-2.0
/* All exmaps: for whoever looks after more than one, which are the self-check and the shrinker. */

#include <linux/list.h>
#include <linux/mutex.h>

#include "exmap/exmap.h"

static LIST_HEAD(exmaps);
static DEFINE_MUTEX(exmaps_lock);	/* protects the list */

void exmap_register(struct exmap *exmap)
{
	mutex_lock(&exmaps_lock);
	list_add_tail(&exmap->node, &exmaps);
	mutex_unlock(&exmaps_lock);
}

void exmap_unregister(struct exmap *exmap)
{
	mutex_lock(&exmaps_lock);
	list_del(&exmap->node);
	mutex_unlock(&exmaps_lock);
}

static void each(bool (*visit)(struct exmap *exmap, void *data), void *data)
{
	struct exmap *exmap;

	list_for_each_entry(exmap, &exmaps, node)
		if (!visit(exmap, data))
			break;
}

void exmap_each(bool (*visit)(struct exmap *exmap, void *data), void *data)
{
	mutex_lock(&exmaps_lock);
	each(visit, data);
	mutex_unlock(&exmaps_lock);
}

bool exmap_try_each(bool (*visit)(struct exmap *exmap, void *data), void *data)
{
	if (!mutex_trylock(&exmaps_lock))
		return false;
	each(visit, data);
	mutex_unlock(&exmaps_lock);
	return true;
}
