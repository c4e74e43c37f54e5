// SPDX-License-Identifier: GPL-2.0
/* The list of all exmaps, for the self-check and the shrinker. */

#include <linux/list.h>
#include <linux/mutex.h>

#include "exmap/exmap.h"

static LIST_HEAD(exmap_list);
static DEFINE_MUTEX(exmap_list_lock);	/* protects the list */

void exmap_register(struct exmap *exmap)
{
	mutex_lock(&exmap_list_lock);
	list_add_tail(&exmap->node, &exmap_list);
	mutex_unlock(&exmap_list_lock);
}

void exmap_unregister(struct exmap *exmap)
{
	mutex_lock(&exmap_list_lock);
	list_del(&exmap->node);
	mutex_unlock(&exmap_list_lock);
}

static void __exmap_each(bool (*visit)(struct exmap *exmap, void *data), void *data)
{
	struct exmap *exmap;

	list_for_each_entry(exmap, &exmap_list, node)
		if (!visit(exmap, data))
			break;
}

void exmap_each(bool (*visit)(struct exmap *exmap, void *data), void *data)
{
	mutex_lock(&exmap_list_lock);
	__exmap_each(visit, data);
	mutex_unlock(&exmap_list_lock);
}

bool exmap_try_each(bool (*visit)(struct exmap *exmap, void *data), void *data)
{
	if (!mutex_trylock(&exmap_list_lock))
		return false;
	__exmap_each(visit, data);
	mutex_unlock(&exmap_list_lock);
	return true;
}
